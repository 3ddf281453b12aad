"""From the factors of one backward pass to ``p.grad``: norms, coefficients, clipped sums."""

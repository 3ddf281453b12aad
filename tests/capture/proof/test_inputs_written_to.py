"""Models that write into their inputs find them as the user gave them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping

B, T, K = 4, 3, 6


class Writes(nn.Module):
    """Adds 1 to one of its inputs.

    Args:
        which: the input that is written to.
        borrows: whether a weight of another module is used.
    """

    def __init__(self, which: str, borrows: bool = False) -> None:
        super().__init__()
        self.which, self.borrows = which, borrows
        self.table, self.linear = nn.Embedding(20, K), nn.Linear(K, K)

    def forward(self, ids: Tensor, x: Tensor, shared: Tensor) -> Tensor:
        if x.requires_grad or shared.requires_grad:
            raise ValueError("no gradients of inputs")
        {"ids": ids, "x": x, "shared": shared}[self.which].add_(1)
        h = self.linear(x * shared + self.table(ids)).tanh()
        return h @ self.table.weight.T if self.borrows else h


@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("which", ["ids", "x", "shared"])
def test_the_proof_leaves_inputs_alone(which: str, borrows: bool) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Writes(which, borrows))
    given = torch.randint(0, 10, (B, T)), torch.randn(B, T, K), torch.rand(1, T, K)
    inputs = [x.clone() for x in given]
    flash(*inputs).square().sum().backward()
    for name, x, before in zip(("ids", "x", "shared"), inputs, given, strict=True):
        assert torch.equal(x, before + 1 if name == which else before)

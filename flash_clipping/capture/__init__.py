"""From a model's forward and backward to factors: taps on layers, stand-ins for bare
parameters, and the proof of which rows are a sample. Knows modules and autograd, but not Opacus."""

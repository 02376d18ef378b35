"""The CPU backend: compiled kernels, their bindings and PyTorch fallbacks."""

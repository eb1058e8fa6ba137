"""CUDA graphs and torch.compile."""

"""Kernels on single tokens in Triton."""

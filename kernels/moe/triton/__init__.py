"""Kernels of routing in Triton."""

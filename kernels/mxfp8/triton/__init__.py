"""Kernels of MXFP8 in Triton."""

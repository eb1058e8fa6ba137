"""Kernels of the jagged operators in Triton, for sm_80 and newer."""

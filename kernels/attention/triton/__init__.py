"""Attention kernels in Triton, for sm_80 and newer."""

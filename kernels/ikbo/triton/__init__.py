"""Kernels of requests and their candidates in Triton, for sm_80 and newer."""

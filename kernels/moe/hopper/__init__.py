"""Kernels of routed experts in Gluon, for Hopper."""

"""Kernels of the jagged operators in Gluon, for Hopper."""

"""Kernels of requests and their candidates in Gluon, for Hopper."""

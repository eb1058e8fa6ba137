"""GDPA kernels in Gluon, for Hopper."""

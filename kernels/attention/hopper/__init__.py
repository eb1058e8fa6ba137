"""Attention kernels in Gluon, for Hopper: persistent, warp-specialised, asynchronous."""

"""Quantisation and products of MXFP8 in Gluon, for Hopper."""

"""Constants of the specifications that kernels of several families share."""

EPSILON = 1e-5  # added to mean squares and variances before their root

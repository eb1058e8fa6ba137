"""Layers applied to each token: MLPs and task heads, feed-forward blocks, weights of its own for each token."""

"""Operators on the candidates of requests that never broadcast what belongs to the request."""

from kernels.ikbo.attention import joint_attention, nested_offsets, target_attention
from kernels.ikbo.expand import expand_rows
from kernels.ikbo.lce import linear_compression
from kernels.ikbo.stacked import stacked_linear
from kernels.ikbo.tree import tree_attention

__all__ = [
    "expand_rows",
    "joint_attention",
    "linear_compression",
    "nested_offsets",
    "stacked_linear",
    "target_attention",
    "tree_attention",
]

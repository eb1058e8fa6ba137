"""Rotary position embedding (RoPE, arXiv 2104.09864) for jagged sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tokens import rotate, rotate_qkv

__all__ = ["BASE", "Rotation", "rotate", "rotate_qkv", "rotation"]

Rotation = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""What `rotation` returns, and `rotate` and `rotate_qkv` take after their first argument."""

BASE = 10_000.0
"""InterFormer states no base; this is the original one."""


def rotation(positions: Tensor, head_dim: int, num_positions: int | None = None) -> Rotation:
    """(cos, sin), each [N, head_dim / 2] float32, of integer `positions` [N]. Position 0 is no rotation.

    With `num_positions`, larger than every position, it returns (cos, sin, positions) instead, where cos and sin are
    tables of all positions, [num_positions, head_dim / 2]: less to read where many tokens share a position.
    """
    tokens = positions if num_positions is None else torch.arange(num_positions, device=positions.device)
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = tokens[:, None].float() * BASE ** (-pair / head_dim)
    angles = angle.cos(), angle.sin()
    return angles if num_positions is None else (*angles, positions)

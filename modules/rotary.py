"""Rotary position embedding (RoPE, arXiv 2104.09864) for jagged sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tokens import rotate

__all__ = ["BASE", "rotate", "rotation"]

BASE = 10_000.0
"""InterFormer states no base; this is the original one."""


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [N, head_dim / 2] float32, of integer `positions` [N]. Position 0 is no rotation."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None].float() * BASE ** (-pair / head_dim)
    return angle.cos(), angle.sin()

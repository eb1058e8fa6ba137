"""Rotary position embedding (RoPE, arXiv 2104.09864) for jagged sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tokens import project_qkv, rotate, rotate_qkv

__all__ = ["BASE", "Rotation", "from_end", "project_qkv", "rotate", "rotate_qkv", "rotation", "time_rotation"]

Rotation = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""What `rotation` returns, and `rotate`, `rotate_qkv` and `project_qkv` take after their first arguments."""

BASE = 10_000.0
"""InterFormer states no base; this is the original one."""
TIME_BASE = 100.0
"""Of the frequencies of `time_rotation`: logarithms of ages span a dozen units, not thousands as positions do."""


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


def time_rotation(positions: Tensor, ages: Tensor, head_dim: int, time_scale: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [N, head_dim / 2] float32, of positions [N] and ages [N] in seconds, negative ones as 0.

    After the temporal rotation (ROTE) of Kunlun (arXiv 2602.10016), whose time part is log(1 + age / time_scale): the
    larger half of the pairs of features turns by the position, the others turn by this logarithm, at frequencies from 1
    down to 1 / `TIME_BASE`. Scores then depend on differences of positions and on ratios of ages.
    """
    pairs = head_dim // 2
    of_time = pairs // 2
    frequency = TIME_BASE ** (-torch.arange(of_time, device=ages.device) / max(1, of_time))
    angle = (ages.clamp(min=0).float() / time_scale).log1p()[:, None] * frequency
    cos, sin, *_ = rotation(positions, 2 * (pairs - of_time))
    return torch.cat([cos, angle.cos()], dim=1), torch.cat([sin, angle.sin()], dim=1)


def from_end(offsets: Tensor, total: int) -> Tensor:
    """[total] int64: places in rows that end at `offsets` [B + 1], counted from the end: 1 is the last."""
    end = torch.repeat_interleave(offsets[1:], offsets.diff(), output_size=total)
    return end - torch.arange(total, device=offsets.device)

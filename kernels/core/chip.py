"""Properties of a chip by which kernels choose their tiles; a CPU, where Triton interprets, counts as having all."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch

from kernels.core import dispatch

# Features of a head that the Hopper kernels of attention and GDPA are written for.
HOPPER_HEADS = (64, 128)


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program may use: 227 KiB on sm_90 and sm_100, 99 on sm_86, sm_89 and sm_120."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 1 << 30


def shared_limit_of(capability: Hashable) -> int:
    """`shared_limit` of chips of a compute capability, also of one that is not there; the least of all if unknown."""
    return 1024 * {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability, 99)  # type: ignore[call-overload]


@cache
def multiplies_registers(device: torch.device) -> bool:
    """Whether tensor cores take their operands from registers, as on sm_8x and sm_12x, and not from shared memory.

    Threads then hold operands as well as sums; tiles made for sm_90 leave no registers for both.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (8, 12)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def needs_hopper_heads(
    device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int
) -> str | None:
    """A reason why the Hopper kernels of attention and GDPA cannot serve these heads, or None."""
    if reason := dispatch.needs_triton(device, capability, (9, 0)) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if head_dim != value_dim or head_dim not in HOPPER_HEADS:
        return f"needs heads of {HOPPER_HEADS[0]} or {HOPPER_HEADS[1]} features, got {head_dim} and {value_dim}"
    return None

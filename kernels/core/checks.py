"""Checks of arguments that the public functions of the jagged operators share."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from kernels.core.caches import cached


def check_offsets(total: int, offsets: Tensor) -> None:
    """ValueError unless offsets run from 0 to `total`. Checked on the CPU only: on a GPU it would be a sync."""
    if not _readable(offsets):
        return
    if offsets.dim() != 1 or offsets.shape[0] == 0 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"offsets must be [B + 1] int32 or int64, got {list(offsets.shape)} {offsets.dtype}")
    if offsets[0] != 0:
        raise ValueError(f"offsets begin with {int(offsets[0])}; offsets[0], where the first row starts, must be 0")
    if offsets[-1] != total:
        raise ValueError(f"offsets end at {int(offsets[-1])} but there are {total} values")
    lengths = offsets.diff()
    if (lengths < 0).any():
        row = int((lengths < 0).int().argmax())
        raise ValueError(
            f"offsets must not decrease, but row {row} goes from {int(offsets[row])} to {int(offsets[row + 1])}"
        )


def check_floating(values: Tensor, name: str) -> None:
    """ValueError for integers, which operators that compute in float32 would round."""
    if not values.is_floating_point():
        raise ValueError(f"{name} must be floating, got {values.dtype}; e.g. {name}.double()")


def check_not_negative(numbers: Tensor, name: str) -> None:
    """ValueError where numbers count from the end in Python, which nothing does here. Only the CPU looks."""
    if _readable(numbers) and (numbers < 0).any():
        raise ValueError(f"{name} must not be negative, got {int(numbers.min())}")


def check_lengths(offsets: Tensor, maximum: int, name: str) -> None:
    """ValueError when a row is longer than `maximum`; on a GPU an asynchronous device assertion, once for a batch."""
    if offsets.shape[0] < 2:
        return
    real = type(offsets) is Tensor and not torch.compiler.is_compiling()  # and not the fake of a trace
    if real and _runs_triton(offsets.device):
        from kernels.core.lengths import assert_lengths

        longest = int(maximum)
        cached(lambda: assert_lengths(offsets, longest), ("lengths", longest), offsets)
        return
    longest = offsets.diff().max()
    if not _readable(offsets):
        torch._assert_async(longest <= maximum, f"a jagged row is longer than {name}")
    elif longest > maximum:
        row = int(offsets.diff().argmax())
        raise ValueError(f"row {row} has {int(longest)} values, more than {name}={maximum}; raise {name}")


def _readable(tensor: Tensor) -> bool:
    """Whether numbers can be read without a wait: those of a tensor on the CPU, unless it is traced."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def _runs_triton(device: torch.device) -> bool:
    # Triton launches on the current device, wherever tensors are.
    return device.type == "cuda" and device.index == torch.cuda.current_device() and _has_triton(device)


@cache
def _has_triton(device: torch.device) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless the operands of an attention of jagged queries to jagged keys fit together."""
    if (
        not q.dim() == k.dim() == v.dim() == 3
        or k.shape[:2] != v.shape[:2]
        or q.shape[2] != k.shape[2]
        or not k.shape[1]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected "
            "q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv] with H a multiple of Hkv"
        )


def check_rows(dense: Tensor, offsets: Tensor, name: str) -> None:
    """ValueError unless the dense operand `name` has one entry a row."""
    if dense.shape[0] != offsets.shape[0] - 1:
        raise ValueError(f"{name} has {dense.shape[0]} rows and the offsets have {offsets.shape[0] - 1}")

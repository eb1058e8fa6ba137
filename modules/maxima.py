"""Largest lengths that a module is configured with, checked in its own words."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jagged import check_lengths


def check_maximum(offsets: Tensor, maximum: int, name: str) -> None:
    """ValueError for a row that is longer than `maximum`, the constant `name` of a module; on the CPU.

    On a GPU the operator behind the module has a device assertion, and one is enough.
    """
    if type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_lengths(offsets, maximum, name)

"""Checks of the largest lengths that a module is configured with, with errors that name the module's own constants."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.jagged import check_lengths


def check_maximum(offsets: Tensor, maximum: int, name: str) -> None:
    """ValueError if a row is longer than `maximum`, the constant `name` of a module. Checked on the CPU only.

    On a GPU the operator that the module calls has a device assertion, and a second one is not needed.
    """
    if type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_lengths(offsets, maximum, name)

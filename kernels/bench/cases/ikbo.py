"""Benchmark cases of operators on requests and their candidates: `python -m kernels.bench ikbo`."""

from __future__ import annotations

import torch

from kernels.bench import Case
from kernels.bench.cases import ikbo_attention, ikbo_lce


def cases(device: torch.device) -> list[Case]:
    return ikbo_lce.cases(device) + ikbo_attention.cases(device)

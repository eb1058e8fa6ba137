"""Benchmark cases of operators on requests and their candidates: `python -m kernels.bench ikbo`."""

from __future__ import annotations

import torch

from kernels.bench import Case
from kernels.ikbo import bench_attention, bench_lce


def cases(device: torch.device) -> list[Case]:
    return bench_lce.cases(device) + bench_attention.cases(device)

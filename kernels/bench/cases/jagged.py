"""Benchmark cases of the jagged operators: `python -m kernels.bench jagged`."""

from __future__ import annotations

import torch

from kernels.bench import Case
from kernels.bench.cases import jagged_attention, jagged_low_rank, jagged_operators, jagged_pooling, jagged_sweep


def cases(device: torch.device) -> list[Case]:
    parts = (jagged_attention, jagged_pooling, jagged_sweep, jagged_operators, jagged_low_rank)
    return [case for part in parts for case in part.cases(device)]

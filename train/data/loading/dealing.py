"""Requests of a global batch dealt out over ranks by their cost: `parallel.balance`.

Ranks wait for each other in every step, so that a step takes as long as that of the rank with the longest histories.
Blocks of requests stay together, as caches and readers like neighbours; every rank gets equally many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from modules.batch import RequestBatch


@dataclass(frozen=True)
class Cost:
    """Work of a request with histories of T events together: fixed + event * T + pair * T^2, in any unit."""

    fixed: float
    event: float
    pair: float

    @classmethod
    def measured(cls, flops: Callable[[float, float, float, float], float], sample: RequestBatch) -> Self:
        """By `flops` of (requests, candidates, events, pairs), of a request with as many candidates as in a sample."""
        candidates = sample.num_candidates / sample.num_requests
        fixed = flops(1, candidates, 0, 0)
        return cls(fixed, flops(1, candidates, 1, 0) - fixed, flops(1, candidates, 0, 1) - fixed)

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """lengths [N] -> [N] float64."""
        length = lengths.astype(np.float64)
        return self.fixed + self.event * length + self.pair * length**2


def deal(costs: np.ndarray, ranks: int, block: int) -> np.ndarray:
    """Places [ranks, N / ranks] int64, ascending, of N requests of costs [N]: each rank gets N / block / ranks blocks.

    In turn, the heaviest blocks that are left go to the ranks, the heaviest of them to the rank with the least so far.
    N must be a multiple of block * ranks.
    """
    blocks = costs.reshape(-1, block).sum(1)
    loads, dealt = np.zeros(ranks), np.empty((ranks, len(blocks) // ranks), np.int64)
    heaviest = np.argsort(-blocks, kind="stable").reshape(-1, ranks)
    for turn, given in enumerate(heaviest):
        takers = np.argsort(loads, kind="stable")
        dealt[takers, turn] = given
        loads[takers] += blocks[given]
    places = np.sort(dealt, axis=1)[..., None] * block + np.arange(block)
    return places.reshape(ranks, -1)


def imbalance(loads: np.ndarray) -> float:
    """Largest load over the mean load, less 1: the share of a step by which the slowest rank is late."""
    mean = loads.mean()
    return float(loads.max() / mean - 1) if mean > 0 else 0.0


class Dealer:
    """Deals whole global batches; the smaller last one of an epoch stays in order. Keeps the mean imbalance."""

    def __init__(self, cost: Cost, ranks: int, block: int) -> None:
        self._cost, self._ranks, self._block = cost, ranks, block
        self.reset()

    def reset(self) -> None:
        self._steps, self._before, self._after = 0, 0.0, 0.0

    def share(self, lengths: np.ndarray, rank: int) -> np.ndarray:
        """Places of a rank's requests among those of a global batch, whose histories have `lengths` events [N]."""
        costs = self._cost.of(lengths)
        dealt = deal(costs, self._ranks, self._block)
        self._steps += 1
        self._before += imbalance(costs.reshape(self._ranks, -1).sum(1))
        self._after += imbalance(costs[dealt].sum(1))
        return dealt[rank]

    def compute(self) -> dict[str, float]:
        """Means over the batches dealt since `reset`: if ranks took requests in order, and as they are dealt."""
        if not self._steps:
            return {}
        return {"imbalance_in_order": self._before / self._steps, "imbalance": self._after / self._steps}

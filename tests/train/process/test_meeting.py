"""Ranks that meet in a store which still holds what the ranks of an earlier start wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from train.process.distributed import _meeting

RANKS = 3


def meet(store: dist.Store) -> set[str]:
    with ThreadPoolExecutor(RANKS) as processes:  # the last rank begins first
        return set(processes.map(lambda rank: _meeting(store, rank, RANKS, 60), reversed(range(RANKS))))


def test_ranks_of_one_start_agree_on_a_name_of_their_own() -> None:
    store = dist.HashStore()
    (first,) = meet(store)
    (second,) = meet(store)
    store.set("meeting", "died-before-the-others-came")
    (third,) = meet(store)
    assert len({first, second, third, "died-before-the-others-came"}) == 4

"""Tables of offsets are made once, and anew when what they depend on may have changed."""

from __future__ import annotations

import copy
import gc
import pickle

import torch
from torch import Tensor

from kernels.core import caches
from kernels.core.caches import cached


class Maker:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Tensor:
        self.times += 1
        return torch.tensor(self.times)


def test_a_table_is_made_once_for_the_same_offsets() -> None:
    make, offsets, others = Maker(), torch.tensor([0, 3]), torch.tensor([0, 4])
    for pair in ((offsets, others), (offsets, offsets), (others, offsets)):
        first = cached(make, "key", *pair)
        assert cached(make, "key", *pair) is first
    assert cached(make, "another key", offsets, others) is not cached(make, "key", offsets, others)


def test_a_table_is_made_anew_for_what_was_written_to() -> None:
    make, offsets, others = Maker(), torch.tensor([0, 3]), torch.tensor([0, 4])
    for _ in range(2):
        cached(make, "key", offsets, others)
    assert make.times == 1
    offsets[1] = 2
    cached(make, "key", offsets, others)
    others.zero_()
    cached(make, "key", offsets, others)
    # Equal in value, but what happens to them is another matter.
    cached(make, "key", offsets, others.clone())
    cached(make, "key", offsets.clone(), others)
    assert make.times == 5


def test_a_table_may_be_of_any_number_of_offsets() -> None:
    make, offsets = Maker(), [torch.tensor([0, length]) for length in range(3)]
    for count in (1, 2, 3):
        first = cached(make, "key", *offsets[:count])
        assert cached(make, "key", *offsets[:count]) is first
    assert make.times == 3
    for written in offsets:
        written.zero_()
        cached(make, "key", *offsets)
    assert make.times == 6


def test_nothing_is_kept_longer_than_the_offsets() -> None:
    make, offsets = Maker(), torch.tensor([0, 3])
    before = len(caches._tables)
    cached(make, "key", offsets, offsets)
    assert len(caches._tables) == before + 1
    del offsets
    gc.collect()
    assert len(caches._tables) == before


def test_a_batch_leaves_no_tables_to_the_next() -> None:
    make, offsets, others, more = Maker(), torch.tensor([0, 3]), torch.tensor([0, 4]), torch.tensor([0, 5])
    for total in range(5):
        offsets[1] = total
        for _ in range(2):
            cached(make, total, offsets, others)
            cached(make, total, offsets, more)
            cached(make, -total, offsets, offsets)
    others.zero_()
    cached(make, "key", offsets, more)
    assert len(caches._tables[id(offsets)][1]) <= 3


def test_writes_that_are_not_counted_leave_nothing_to_remember() -> None:
    make = Maker()
    with torch.inference_mode():
        offsets = torch.tensor([0, 3])
        for _ in range(2):
            cached(make, "key", offsets, offsets)
    assert make.times == 2


def test_offsets_with_tables_can_be_copied_and_sent() -> None:
    offsets = torch.tensor([0, 3])
    cached(Maker(), "key", offsets, offsets)
    assert torch.equal(copy.deepcopy(offsets), offsets)
    assert torch.equal(pickle.loads(pickle.dumps(offsets)), offsets)

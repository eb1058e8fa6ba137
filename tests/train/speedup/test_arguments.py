"""Arguments taken apart and put together again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from modules.broadcast import CandidateRows
from train.speedup.arguments import take_apart


class Pair(NamedTuple):
    first: Tensor
    second: int


def test_what_is_taken_apart_goes_together_again() -> None:
    x, y, z, u, v = (torch.tensor(float(number)) for number in range(5))
    apart = take_apart(x, [y, None], Pair(z, 3), rows=CandidateRows(u, v), names={"a": {1, 2}})
    assert [float(each) for each in apart.tensors] == [0, 1, 2, 3, 4]
    arguments, named = apart.together([each + 10 for each in apart.tensors])
    assert arguments == (x + 10, [y + 10, None], Pair(z + 10, 3))
    assert named == {"rows": CandidateRows(u + 10, v + 10), "names": {"a": {1, 2}}}


def test_kinds_are_equal_where_only_tensors_differ() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    assert take_apart(x, (x, 1)).kind == take_apart(y, (y, 1)).kind
    others = [take_apart(x, (x, 2)), take_apart(x, [x, 1]), take_apart(x, x), take_apart(x, x=(x, 1))]
    assert len({apart.kind for apart in [take_apart(x, (x, 1)), *others]}) == 5
    assert take_apart({1}).kind != take_apart({1}).kind

"""Tokens over ranks, TokenMixer-Large's token parallel (arXiv 2602.06563): each of P ranks has the networks of T / P
tokens, for the requests and candidates of all P ranks.

Mixing turns tokens into heads, and a rank's tokens into slices for the heads of all ranks: it is the exchange. L blocks
that mix and revert take 2 L + 1 of them, with sizes that no routing changes: x and Mix(x) go to their ranks in one,
then slices for each later mixing or reverting, and at last each rank's sums over its tokens return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.layers.feed_forward.token_linear import TokenFeedForward
from modules.layers.moe.exchange import PAYLOADS, exchange_tokens
from modules.models.token_mixing.sequences import Sides


class Mixed(NamedTuple):
    """Mixed tokens. What is 0 because user tokens receive nothing from item tokens is left out."""

    user: Tensor | None  # [R, T_u, T_u k]
    shared: Tensor | None  # [R, T_i, T_u k]: what user tokens give to item tokens
    own: Tensor  # [C, T_i, T_i k]


def turned(slices: Sequence[Tensor]) -> list[Tensor]:
    """Each [rows, T, H, k] -> [rows, H, T k]."""
    return [each.transpose(1, 2).flatten(2) for each in slices]


class TokenRanks:
    """The ranks of `group`, which carries tensors of the CPU as well; `width` k divides all that is exchanged.

    Every call is a collective. Gradients go back the same way.
    """

    def __init__(self, group: dist.ProcessGroup, payload: str, width: int) -> None:
        """`payload`: of PAYLOADS."""
        self.group, self.rounded, self.width = group, PAYLOADS[payload], width
        self.part = group.rank(), group.size()

    def enter(
        self, x: Sides, mixed: Mixed | None, rows: CandidateRows
    ) -> tuple[Sides, Mixed | None, CandidateRows, list[list[int]]]:
        """All tokens of this rank's rows -> this rank's tokens of all ranks' rows, these rows, and how many requests
        and candidates of each rank they are, which the hosts tell each other."""
        count = self.part[1]
        told = torch.tensor([len(rows.offsets) - 1, x[1].shape[0]]).repeat(count, 1)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=self.group)
        sizes = heard.T.tolist()
        lengths = rows.offsets.new_empty(sum(sizes[0]))
        own = rows.offsets.diff().repeat(count)
        dist.all_to_all_single(lengths, own, sizes[0], [len(rows.offsets) - 1] * count, group=self.group)
        rows = CandidateRows.of_offsets(F.pad(lengths.cumsum(0), (1, 0)), sum(sizes[1]))

        given = [(0, x[0]), (1, x[1])]
        if mixed is not None:
            given += [(0, mixed.user), (0, mixed.shared), (1, mixed.own)]
        there = [(sizes[side], each) for side, each in given if each is not None]
        sent = [each.chunk(count, 1) for _, each in there]
        shapes = [[(rows, each.shape[1] // count, each.shape[2]) for rows in of_ranks] for of_ranks, each in there]
        arrived = iter([torch.cat(parts) for parts in self._exchange(sent, shapes, self.rounded)])
        user, item, *rest = [None if each is None else next(arrived) for _, each in given]
        assert item is not None
        return (user, item), Mixed(rest[0], rest[1], cast(Tensor, rest[2])) if rest else None, rows, sizes

    def turned(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Each [rows, T / P, H, k] of this rank's tokens -> [rows, H / P, T k] of its heads."""
        sent = [each.chunk(self.part[1], 2) for each in slices]
        shapes = [[part.shape for part in parts] for parts in sent]
        return turned([torch.cat(parts, 1) for parts in self._exchange(sent, shapes, self.rounded)])

    def leave(self, given: Sequence[Tensor], sizes: list[list[int]]) -> list[list[Tensor]]:
        """Rows [rows of all ranks, ..] of requests, and after them of candidates -> of each, what every rank has for
        the rows of this one."""
        index, count = self.part
        sent = [each.split(own) for each, own in zip(given, sizes[-len(given) :], strict=True)]
        shapes = [[parts[index].shape] * count for parts in sent]
        return self._exchange(sent, shapes, (False, False))

    def call(self, layer: nn.Module, *inputs: Any, **named: Any) -> Tensor:
        """A layer with the weights of this rank's tokens."""
        if not isinstance(layer, TokenFeedForward):
            return layer(*inputs, **named)
        index, count = self.part
        own = {name: weight.chunk(count)[index] for name, weight in layer.named_parameters()}
        return functional_call(layer, own, inputs, named)

    def _exchange(
        self, given: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Any]], rounded: tuple[bool, bool]
    ) -> list[list[Tensor]]:
        """Each a tensor for each rank -> as many of these shapes, one from each rank, in one collective."""
        width, ranks = self.width, range(self.part[1])
        sent = [[each[rank].reshape(-1, width) for each in given] for rank in ranks]
        coming = [[torch.Size(each[rank]).numel() // width for each in shapes] for rank in ranks]
        arrived = exchange_tokens(
            torch.cat([each for parts in sent for each in parts]),
            [sum(parts) for parts in coming],
            [sum(map(len, parts)) for parts in sent],
            self.group,
            rounded,
        )
        pieces = iter(arrived.split([each for parts in coming for each in parts]))
        made = [[next(pieces).view(each[rank]) for each in shapes] for rank in ranks]
        return [list(parts) for parts in zip(*made, strict=True)]

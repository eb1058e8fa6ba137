"""Looked-up rows on their way between ranks: what TorchRec's exchange does around its collective, in fewer passes.

The rank that holds a table looks up rows feature by feature, each feature for all ranks, and sends them rank by rank.
TorchRec brings rows from one order into the other by FBGEMM's operator for jagged ids, which moves each value of a row
on its own and reaches a fifth of the memory's bandwidth. Here whole rows go to places that this operator has found
for their numbers. Rows that stay on a rank go there while the others are on their way, and so do their gradients.
Received rows that a row-wise shard has in another order than the batch are moved likewise, so that their gradients need
no addition. The result is a matrix that features are slices of, whose gradients `FiniteGuard` brings together in one
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.dist_data import SequenceEmbeddingsAllToAll
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import Awaitable

from kernels.tokens import move_rows_, place_rows

PIECES = 2
"""More of them wait less for each other, and take more launches."""


def exchange_rows(model: nn.Module) -> None:
    """Let the sharded collections below `model` exchange rows by `RowExchange`, unless codecs round them on the way."""
    for output in _outputs(model):
        theirs = getattr(output, "_dist", None)
        if isinstance(theirs, SequenceEmbeddingsAllToAll) and theirs._codecs is None and theirs._pg.size() > 1:
            output._dist = RowExchange(theirs)


def while_gradients_travel(model: nn.Module, function: Callable[[], None]) -> None:
    """Let each backward call `function` while gradients of rows are on their way, once for each way they take."""
    for output in _outputs(model):
        if isinstance(exchange := getattr(output, "_dist", None), RowExchange):
            exchange.overlapped = function


def _outputs(model: nn.Module) -> Iterator[nn.Module]:
    for collection in model.modules():
        if isinstance(collection, ShardedEmbeddingCollection):
            yield from collection._output_dists


class RowExchange(nn.Module):
    """Serves in the place of a `SequenceEmbeddingsAllToAll`, with the same arguments and results."""

    def __init__(self, theirs: SequenceEmbeddingsAllToAll) -> None:
        super().__init__()
        self._group = theirs._pg
        self._recat = theirs._forward_recat_tensor
        self.overlapped: Callable[[], None] = lambda: None

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: list[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> Awaitable[Tensor]:
        """Rows [N, D] that this rank has looked up, for all ranks -> what will be its own rows [M, D].

        lengths [features, examples of all ranks]; `input_splits`: rows that come from each rank, `output_splits`: that
        go to each. The other arguments are those of ids that were sorted into shards, and of ranks with several numbers
        of examples.
        """
        recat = self._recat
        if sparse_features_recat is not None:
            recat = torch.ops.fbgemm.invert_permute(sparse_features_recat)
        order = torch.arange(len(local_embs), device=local_embs.device)
        if lengths.shape[0] > 1 or sparse_features_recat is not None:
            several = batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1
            counts = lengths.reshape(-1) if several else lengths.reshape(lengths.shape[0] * self._group.size(), -1)
            order = _permuted(order, counts, recat)
        # Of gradients: the loss of a batch is the mean of its ranks'.
        divisor = self._group.size() if get_gradient_division() else 1
        work = _Exchange(self._group, output_splits, input_splits, order, divisor)
        return _Rows(work, _Send.apply(work, local_embs, self.overlapped), unbucketize_permute_tensor)


def _permuted(values: Tensor, lengths: Tensor, recat: Tensor) -> Tensor:
    """Values, of which so many belong together each time, in the order `recat` of these."""
    move = torch.ops.fbgemm.permute_2D_sparse_data if lengths.dim() == 2 else torch.ops.fbgemm.permute_1D_sparse_data
    _, permuted, _ = move(recat, lengths, values, None, len(values))
    return permuted


class _Exchange:
    """Sends rows, and their gradients back, in a few collectives, of which each has a piece of what goes to any rank.

    While one is on its way, the next is put in order, or the one before, and what stays on this rank.
    Not by a send and a receive for each other rank: over gloo such a receive from a rank that was killed waits for its
    timeout.
    """

    def __init__(
        self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int], order: Tensor, divisor: int
    ) -> None:
        """`sent` to and `received` from each rank, in rows. `order` [N]: numbers of the rows as they are sent.

        Gradients are divided by `divisor`.
        """
        self._group, self._divisor = group, divisor
        self._sent, self._received = list(sent), list(received)
        pieces, self._staying = self._split(order, self._sent)
        self._leaving = [(torch.cat(piece), [len(part) for part in piece]) for piece in pieces]

    def begin(self, rows: Tensor) -> None:
        """Send rows [N, D]."""
        self._result = rows.new_empty(sum(self._received), rows.shape[1])
        places, own = self._split(self._result, self._received)
        self._works = []
        for (order, sizes), place in zip(self._leaving, places, strict=True):
            leaving = move_rows_(rows.new_empty(len(order), rows.shape[1]), rows, order)
            self._works.append(_AllToAll(place, leaving.split(sizes), self._group))
        move_rows_(own, rows, self._staying)

    def end(self) -> Tensor:
        """The rows [M, D] that have come here."""
        for work in self._works:
            work.wait()
        result = self._result
        del self._works, self._result
        return result

    def begin_back(self, gradient: Tensor) -> None:
        """Send the gradient [M, D] of what `end` returned, back."""
        parts, own = self._split(gradient.contiguous(), self._received)
        self._arriving = [gradient.new_empty(len(order), gradient.shape[1]) for order, _ in self._leaving]
        places = (piece.split(sizes) for piece, (_, sizes) in zip(self._arriving, self._leaving, strict=True))
        self._works = [_AllToAll(place, part, self._group) for place, part in zip(places, parts, strict=True)]
        self._result = gradient.new_empty(sum(self._sent), gradient.shape[1])
        self._put(own, self._staying)

    def end_back(self) -> Tensor:
        """The gradient [N, D] of what `begin` was given."""
        for work, piece, (order, _) in zip(self._works, self._arriving, self._leaving, strict=True):
            work.wait()
            self._put(piece, order)
        result = self._result
        del self._works, self._arriving, self._result
        return result

    def _put(self, gradient: Tensor, order: Tensor) -> None:
        move_rows_(self._result, gradient, order, scatter=True, divisor=self._divisor)

    def _split(self, whole: Tensor, sizes: list[int]) -> tuple[list[list[Tensor]], Tensor]:
        """A slice for each rank: pieces of those of others (none of this rank's), and this rank's."""
        slices, rank = list(whole.split(sizes)), self._group.rank()
        own, slices[rank] = slices[rank], whole[:0]
        pieces = [rows.tensor_split(PIECES) for rows in slices]
        return [list(piece) for piece in zip(*pieces, strict=True)], own


class _AllToAll:
    """One collective: rows[r] go to each rank r, and what it sends to places[r]. All are kept until `wait`."""

    def __init__(self, places: Sequence[Tensor], rows: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._places, self._rows = list(places), list(rows)
        self._arrived: list[Tensor] | None = None
        if rows[0].is_cuda:
            self._work = dist.all_to_all(self._places, self._rows, group=group, async_op=True)
        else:  # gloo only has the collective of two tensors
            received, sent = ([len(part) for part in parts] for parts in (places, rows))
            arriving = rows[0].new_empty(sum(received), rows[0].shape[1])
            leaving = torch.cat(self._rows)
            self._rows, self._arrived = [leaving], list(arriving.split(received))
            self._work = dist.all_to_all_single(arriving, leaving, received, sent, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        if self._arrived is not None:
            torch._foreach_copy_(self._places, self._arrived)


class _Send(torch.autograd.Function):
    """Begins the exchange of rows [N, D]. What it returns says only that `_Receive` follows it."""

    @staticmethod
    def forward(ctx: Any, work: _Exchange, rows: Tensor, overlapped: Callable[[], None]) -> Tensor:
        ctx.work, ctx.overlapped = work, overlapped
        work.begin(rows)
        return rows.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor, None]:
        ctx.overlapped()
        return None, ctx.work.end_back(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Exchange, sent: Tensor) -> Tensor:
        ctx.work = work
        return work.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.work.begin_back(gradient)
        return None, gradient.new_empty(1)


class _Rows(Awaitable[Tensor]):
    def __init__(self, work: _Exchange, sent: Tensor, unsorted: Tensor | None) -> None:
        """`unsorted` [M]: the received row that each of the batch's ids asked for; None: they are in its order."""
        super().__init__()
        self._work, self._sent, self._unsorted = work, sent, unsorted

    def _wait_impl(self) -> Tensor:
        rows = _Receive.apply(self._work, self._sent)
        if self._unsorted is None:
            return rows
        numbers = torch.arange(len(rows), device=rows.device)
        return place_rows([rows], torch.empty_like(numbers).index_copy_(0, self._unsorted.long(), numbers))

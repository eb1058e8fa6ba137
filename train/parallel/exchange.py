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

from collections.abc import Sequence
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


def exchange_rows(model: nn.Module) -> None:
    """Let the sharded collections below `model` exchange rows by `RowExchange`, unless codecs round them on the way."""
    for collection in model.modules():
        if isinstance(collection, ShardedEmbeddingCollection):
            for output in collection._output_dists:
                theirs = getattr(output, "_dist", None)
                if isinstance(theirs, SequenceEmbeddingsAllToAll) and theirs._codecs is None and theirs._pg.size() > 1:
                    output._dist = RowExchange(theirs)


class RowExchange(nn.Module):
    """Serves in the place of a `SequenceEmbeddingsAllToAll`, with the same arguments and results."""

    def __init__(self, theirs: SequenceEmbeddingsAllToAll) -> None:
        super().__init__()
        self._group = theirs._pg
        self._forth = theirs._forward_recat_tensor

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
        forth = self._forth
        if sparse_features_recat is not None:
            forth = torch.ops.fbgemm.invert_permute(sparse_features_recat)
        order = torch.arange(len(local_embs), device=local_embs.device)
        if lengths.shape[0] > 1 or sparse_features_recat is not None:
            several = batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1
            parts = lengths.reshape(-1) if several else lengths.reshape(lengths.shape[0] * self._group.size(), -1)
            order = _permuted(order, parts, forth)
        # Of gradients: the loss of a batch is the mean of its ranks'.
        divisor = self._group.size() if get_gradient_division() else 1
        work = _Exchange(self._group, output_splits, input_splits, order, divisor)
        return _Rows(work, _Send.apply(work, local_embs), unbucketize_permute_tensor)


def _permuted(values: Tensor, lengths: Tensor, forth: Tensor) -> Tensor:
    """Values, which lie in parts of so many, with the parts in the order `forth`."""
    move = torch.ops.fbgemm.permute_2D_sparse_data if lengths.dim() == 2 else torch.ops.fbgemm.permute_1D_sparse_data
    _, permuted, _ = move(forth, lengths, values, None, len(values))
    return permuted


class _Exchange:
    """One collective, forth with rows and back with their gradients. What stays on this rank is moved beside it.

    Not a send and a receive for each other rank: over gloo such a receive from a rank that was killed waits for its
    timeout.
    """

    def __init__(
        self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int], order: Tensor, divisor: int
    ) -> None:
        """`sent` to and `received` from each rank, in rows. `order` [N]: numbers of the rows as they are sent.

        Gradients are divided by `divisor`.
        """
        self._group, self._rank = group, group.rank()
        self._received, self._divisor = list(received), divisor
        ends = sum(sent[: self._rank]), sum(sent[: self._rank + 1])
        before, self._staying, after = order.tensor_split(ends)
        self._leaving = torch.cat([before, after])
        self._left = [0 if rank == self._rank else count for rank, count in enumerate(sent)]

    def begin(self, rows: Tensor) -> None:
        """Send rows [N, D], forth."""
        leaving = move_rows_(rows.new_empty(len(self._leaving), rows.shape[1]), rows, self._leaving)
        self._result = rows.new_empty(sum(self._received), rows.shape[1])
        places, own = self._apart(self._result)
        self._work = _AllToAll(places, leaving.split(self._left), self._group)
        move_rows_(own, rows, self._staying)

    def end(self) -> Tensor:
        """The rows [M, D] that have come here."""
        self._work.wait()
        result = self._result
        del self._work, self._result
        return result

    def begin_back(self, gradient: Tensor) -> None:
        """Send the gradient [M, D] of what `end` returned, back."""
        parts, own = self._apart(gradient.contiguous())
        self._arriving = gradient.new_empty(len(self._leaving), gradient.shape[1])
        self._work = _AllToAll(self._arriving.split(self._left), parts, self._group)
        self._result = gradient.new_empty(len(self._staying) + len(self._leaving), gradient.shape[1])
        move_rows_(self._result, own, self._staying, scatter=True, divisor=self._divisor)

    def end_back(self) -> Tensor:
        """The gradient [N, D] of what `begin` was given."""
        self._work.wait()
        result = move_rows_(self._result, self._arriving, self._leaving, scatter=True, divisor=self._divisor)
        del self._work, self._result, self._arriving
        return result

    def _apart(self, whole: Tensor) -> tuple[list[Tensor], Tensor]:
        """Slices of a matrix [M, D] that are, or whose gradients go, to other ranks' tables, and that of this one's."""
        parts = list(whole.split(self._received))
        own, parts[self._rank] = parts[self._rank], whole[:0]
        return parts, own


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
    def forward(ctx: Any, work: _Exchange, rows: Tensor) -> Tensor:
        ctx.work = work
        work.begin(rows)
        return rows.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        return None, ctx.work.end_back()


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

"""Looked-up rows on their way between ranks: what TorchRec's exchange does around its collective, in fewer passes.

The rank that holds a table looks up rows feature by feature, each feature for all ranks, and sends them rank by rank.
TorchRec brings rows from one order into the other by FBGEMM's operator for jagged ids, which moves each value of a row
on its own and reaches a fifth of the memory's bandwidth. Here whole rows go to places that this operator has found
for their numbers. Received rows that a row-wise shard has in another order than the batch are moved likewise, so that
their gradients need no addition. The result is a matrix that features are slices of, whose gradients `FiniteGuard`
brings together in one pass.
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

from kernels.tokens import place_rows


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
        self._forth, self._back = theirs._forward_recat_tensor, theirs._backward_recat_tensor

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
        forth, back = self._forth, self._back
        if sparse_features_recat is not None:
            forth, back = torch.ops.fbgemm.invert_permute(sparse_features_recat), sparse_features_recat
        # Of gradients: the loss of a batch is the mean of its ranks'.
        rows, divisor = local_embs, self._group.size() if get_gradient_division() else 1
        if lengths.shape[0] > 1 or sparse_features_recat is not None:
            several = batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1
            parts = lengths.reshape(-1) if several else lengths.reshape(lengths.shape[0] * self._group.size(), -1)
            rows = place_rows([rows], _places(parts, forth, back, len(rows)), gradient_divisor=divisor)
            divisor = 1
        work = _Exchange(self._group, output_splits, input_splits)
        return _Rows(work, _Send.apply(work, rows, divisor), unbucketize_permute_tensor)


def _places(lengths: Tensor, forth: Tensor, back: Tensor, count: int) -> Tensor:
    """[N] int64: where each of N rows goes if parts of so many rows come in the order `forth`, of which `back` is the
    inverse."""
    numbers = torch.arange(count, device=lengths.device)
    move = torch.ops.fbgemm.permute_2D_sparse_data if lengths.dim() == 2 else torch.ops.fbgemm.permute_1D_sparse_data
    _, places, _ = move(back, lengths[forth.long()], numbers, None, count)
    return places


class _Exchange:
    """One collective, forth with rows and back with their gradients.

    Not a send and a receive for each other rank, with a copy of the rows that stay: over gloo such a receive from a
    rank that was killed waits for its timeout, and over NCCL the copy takes what they save.
    """

    def __init__(self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> None:
        """`sent` to and `received` from each rank, in rows."""
        self._group, self._sent, self._received = group, list(sent), list(received)

    def begin(self, rows: Tensor, *, back: bool = False) -> None:
        sizes = (self._sent, self._received) if back else (self._received, self._sent)
        self._from = rows.contiguous()  # kept until it has been sent
        self._to = rows.new_empty(sum(sizes[0]), rows.shape[1])
        self._work = dist.all_to_all_single(self._to, self._from, *sizes, group=self._group, async_op=True)

    def end(self) -> Tensor:
        self._work.wait()
        found = self._to
        del self._work, self._from, self._to
        return found


class _Send(torch.autograd.Function):
    """Begins the exchange of rows [N, D]. What it returns says only that `_Receive` follows it."""

    @staticmethod
    def forward(ctx: Any, work: _Exchange, rows: Tensor, divisor: int) -> Tensor:
        ctx.work, ctx.divisor = work, divisor
        work.begin(rows)
        return rows.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor, None]:
        gradient = ctx.work.end()
        return None, gradient if ctx.divisor == 1 else gradient.div_(ctx.divisor), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Exchange, sent: Tensor) -> Tensor:
        ctx.work = work
        return work.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.work.begin(gradient, back=True)
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

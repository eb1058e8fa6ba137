"""Evaluation of next items: each target's place among all items, over all ranks.

Requests are divided between ranks, the catalogue is looked up in chunks, which the shards of its table on all ranks
answer, and a chunk's scores are counted in blocks: memory holds neither all items nor scores of users x items.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import Tensor

from modules.batch import RequestBatch, select_rows
from modules.models.retrieval import Vectors
from train.build import Job
from train.data.batch import append_candidates, empty_batch
from train.evaluate.vectors import given_vectors
from train.metrics import history_lengths
from train.metrics.catalogue import catalogue_means, catalogue_names, catalogue_sums
from train.metrics.tasks import DEFAULT_TOP_K

CHUNK = 16_384
"""Items that are looked up and scored together."""
BLOCK = 1_024
"""Targets that are."""
HELD = 65_536
"""Targets a rank, about, that are held together with what they saw; the catalogue is looked up once for them."""


@dataclass
class Targets:
    """n rows with a positive label, and their requests' states."""

    query: Tensor  # [n, dim]
    score: Tensor  # [n], of the target itself
    ids: Tensor  # [n] int64
    weights: Tensor  # [n]
    seen: Tensor  # [sum of events] int64: items of the histories, which are not ranked
    seen_lengths: Tensor  # [n]
    row: Tensor  # [n]; those below are for predictions
    request: Tensor
    group: Tensor
    events: Tensor
    of_request: Tensor  # [n] int64: targets of the same request


@torch.no_grad()
def evaluate_catalogue(
    job: Job, batches: Iterable[RequestBatch], top_k: Sequence[int], predictions: Path | None = None
) -> dict[str, float]:
    """mrr, mrr@k, hr@k and ndcg@k of the rows with a positive label, over all ranks, under `task/name`, and recall@k
    where requests may have several (`train.metrics.catalogue` says what is a mean over what).

    Items in the request's history are no candidates unless one is the target, or `tracking.rank_seen` keeps all. A
    target without a row of its own, or whose score is not finite, counts as never found. With `predictions`, a folder,
    every rank writes its targets' ranks there.
    """
    (task,) = job.losses.by_task
    top_k = sorted(set(top_k)) or DEFAULT_TOP_K
    training = job.model.training
    job.model.eval()
    several = job.source.spec.max_candidates > 1
    num_sums = 2 + several + len(catalogue_names(top_k, several=several))
    sums = torch.zeros(num_sums, dtype=torch.float64, device=job.world.device)
    writer = None if predictions is None else _Ranks(predictions, task, job.world.rank)
    size = job.config.data.eval_batch_size or job.config.data.batch_size
    first, items = first_item(job), num_rows(job)
    remaining = iter(batches)
    while group := [_targets(job, batch) for batch in islice(remaining, max(1, HELD // size))]:
        targets = _concatenated(group)
        greater, tied = count_better(job, targets)
        known = (targets.ids >= first) & (targets.ids < items) & targets.score.isfinite()
        of_request = targets.of_request if several else None
        sums += catalogue_sums(greater, tied, known, targets.weights, top_k, of_request)
        if writer is not None:
            writer.write(targets, torch.where(known, greater + (tied + 2) / 2, torch.nan))
    if writer is not None:
        writer.close()
    job.model.train(training)
    if dist.is_initialized():
        dist.all_reduce(sums)
    values = catalogue_means(sums.tolist(), top_k, several=several)
    return {f"{task}/{name}": value for name, value in values.items()}


def first_item(job: Job) -> int:
    """The first row of the item table that is one item's own."""
    return 1 + job.source.oov_rows


def num_rows(job: Job) -> int:
    """Of the item table."""
    spec = job.source.spec
    return spec.tables[spec.candidate[0].table]


def count_better(job: Job, targets: Targets) -> tuple[Tensor, Tensor]:
    """(greater, tied) [n] int64: other items of the catalogue that score higher than each target, and the same."""
    num_targets = targets.ids.shape[0]
    greater, tied = (torch.zeros(num_targets, dtype=torch.int64, device=targets.ids.device) for _ in range(2))
    # What may not count, with the row of its target: what was seen, and the target itself.
    rows = torch.arange(num_targets, device=targets.ids.device)
    out_row = torch.cat([torch.repeat_interleave(rows, targets.seen_lengths), rows])
    out_id = torch.cat([targets.seen, targets.ids])
    order = out_row.argsort(stable=True)
    out_row, out_id = out_row[order], out_id[order]
    bounds = torch.cat([targets.seen_lengths.new_zeros(1), (targets.seen_lengths + 1).cumsum(0)]).tolist()
    for begin in range(first_item(job), num_rows(job), CHUNK):
        items = catalogue_items(job, begin, min(begin + CHUNK, num_rows(job)))
        for start in range(0, num_targets, BLOCK):
            end = min(start + BLOCK, num_targets)
            scores = targets.query[start:end] @ items.T
            row, out = out_row[bounds[start] : bounds[end]] - start, out_id[bounds[start] : bounds[end]] - begin
            inside = (out >= 0) & (out < items.shape[0])
            scores[row[inside], out[inside]] = -torch.inf
            own = targets.score[start:end, None]
            greater[start:end] += (scores > own).sum(1)
            tied[start:end] += (scores == own).sum(1)
    return greater, tied


def catalogue_items(job: Job, begin: int, end: int) -> Tensor:
    """[end - begin, dim] float32: what queries are multiplied with, of these rows of the item table. A collective."""
    batch = append_candidates(empty_batch(job.source.spec), torch.arange(begin, end)).to(job.world.device)
    return vectors(job, batch).items


def vectors(job: Job, batch: RequestBatch) -> Vectors:
    """Of a batch's requests and candidates."""
    return cast(Vectors, given_vectors(job, batch))


def _targets(job: Job, batch: RequestBatch) -> Targets:
    batch = batch.to(job.world.device, non_blocking=True)
    query, item = vectors(job, batch)
    positive = ((batch.labels[:, 0] == 1) & (batch.weights[:, 0] > 0)).nonzero().squeeze(1)
    owner = batch.owner[positive]
    query, item = query[owner], item[positive]
    seen = select_rows(batch.histories, owner)[batch.histories.keys()[0]]
    seen_items, seen_lengths = seen.values(), seen.lengths().long()
    if job.config.tracking.rank_seen:
        seen_items, seen_lengths = seen_items[:0], torch.zeros_like(seen_lengths)
    return Targets(
        query=query,
        score=_scores(query, item),
        ids=batch.candidate_sparse.values()[positive],
        weights=batch.weights[positive, 0],
        seen=seen_items,
        seen_lengths=seen_lengths,
        row=batch.row[positive],
        request=batch.row[batch.candidate_offsets[owner]],
        group=batch.group[positive],
        events=history_lengths(batch).sum(0)[owner],
        of_request=torch.bincount(owner, minlength=batch.num_requests)[owner],
    )


def _scores(query: Tensor, item: Tensor) -> Tensor:
    """query . item of each row, by the kind of product that scores the catalogue: equal items get equal scores."""
    parts = zip(query.split(256), item.split(256), strict=True)
    return torch.cat([query.new_zeros(0), *((left @ right.T).diagonal() for left, right in parts)])


def _concatenated(parts: Sequence[Targets]) -> Targets:
    return Targets(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Targets)))


class _Ranks:
    """One parquet file a rank: `part-<rank>.parquet`, a row for each target."""

    def __init__(self, folder: Path, task: str, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = ("row", "request", "group", "events")
        types = [*((name, pa.int64()) for name in names), ("weight", pa.float32()), (f"{task}_rank", pa.float32())]
        self._schema = pa.schema(types)
        self._writer = pq.ParquetWriter(folder / f"part-{rank:05d}.parquet", self._schema)

    def write(self, targets: Targets, rank: Tensor) -> None:
        """`rank` [n], from 1 on; the middle of those that the target shares, NaN if it is no item."""
        columns = (targets.row, targets.request, targets.group, targets.events, targets.weights.float(), rank.float())
        arrays: list[np.ndarray] = [column.cpu().numpy() for column in columns]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()

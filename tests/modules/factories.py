"""Small random batches for tests that need no data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import EventType, FeatureSpec, RequestBatch, SparseFeature, Vendors


def random_spec(num_events: int = 2, max_length: int = 6, tasks: tuple[str, ...] = ("click", "like")) -> FeatureSpec:
    """Request and candidate features with a list and dense ones, and events of two fields that share their tables."""
    events = tuple(
        EventType(f"event{i}", (SparseFeature("item", "item"), SparseFeature("tag", "tag")), max_length)
        for i in range(num_events)
    )
    return FeatureSpec(
        tables={"user": 20, "item": 30, "tag": 10},
        request=(SparseFeature("user", "user"),),
        candidate=(SparseFeature("item", "item"), SparseFeature("tags", "tag", is_list=True)),
        histories=events,
        request_dense=("age", "hour"),
        candidate_dense=("price",),
        tasks=tasks,
        max_candidates=4,
    )


def vendor_spec(**settings: Any) -> FeatureSpec:
    """`random_spec` with features of vendors: an id, a list and a number."""
    spec = random_spec(**settings)
    vendor = (SparseFeature("shop", "shop"), SparseFeature("shop_tags", "tag", is_list=True))
    return replace(spec, tables=spec.tables | {"shop": 7}, vendor=vendor, vendor_dense=("fame",))


def random_batch(
    spec: FeatureSpec,
    candidates: Sequence[int] = (2, 0, 1, 3, 1),
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    vendors: Sequence[Sequence[int]] | None = None,
) -> RequestBatch:
    """A request for each number in `candidates`; `lengths` are each request's events of every type (None: random).

    `vendors`, of a spec that has some: for each request the candidates of its vendors (None: the first candidate has a
    vendor of its own, the others share one, and a vendor without candidates follows).
    """
    generator = torch.Generator().manual_seed(seed)
    num_requests, num_candidates = len(candidates), sum(candidates)

    def integers(high: int, size: int) -> Tensor:
        return torch.randint(high, (size,), generator=generator)

    def jagged(features: Sequence[tuple[str, str]], row_lengths: Sequence[Tensor], rows: int) -> KeyedJaggedTensor:
        ids = [integers(spec.tables[table], int(n.sum())) for (_, table), n in zip(features, row_lengths, strict=True)]
        return KeyedJaggedTensor(
            keys=[key for key, _ in features],
            values=torch.cat([torch.zeros(0, dtype=torch.int64), *ids]),
            lengths=torch.cat([torch.zeros(0, dtype=torch.int64), *row_lengths]),
            stride=rows,
        )

    def side(features: Sequence[SparseFeature], rows: int) -> KeyedJaggedTensor:
        ones = torch.ones(rows, dtype=torch.int64)
        row_lengths = [integers(4, rows) if feature.is_list else ones for feature in features]
        return jagged([(feature.name, feature.table) for feature in features], row_lengths, rows)

    fields, field_lengths, times, event_lengths = [], [], [], []
    for event in spec.histories:
        length = integers(event.max_length + 1, num_requests) if lengths is None else torch.tensor(lengths)
        fields += [(event.key(field), field.table) for field in event.fields]
        field_lengths += [length] * len(event.fields)
        event_lengths.append(length)
        times += [integers(1000, n).sort().values for n in length.tolist()]
    counts = torch.tensor(candidates, dtype=torch.int64)
    made = None
    if spec.num_vendor_tokens:
        vendors = vendors or [[min(count, 1), max(count - 1, 0), 0] for count in candidates]
        each = torch.tensor([count for request in vendors for count in request], dtype=torch.int64)
        made = Vendors(
            sparse=side(spec.vendor, len(each)),
            dense=torch.randn(len(each), len(spec.vendor_dense), generator=generator),
            offsets=torch.tensor([0, *(len(request) for request in vendors)]).cumsum(0),
            candidate_offsets=torch.nn.functional.pad(each.cumsum(0), (1, 0)),
        )
    labels = integers(2, num_candidates * len(spec.tasks)).float().view(num_candidates, len(spec.tasks))
    return RequestBatch(
        request_sparse=side(spec.request, num_requests),
        candidate_sparse=side(spec.candidate, num_candidates),
        request_dense=torch.randn(num_requests, len(spec.request_columns), generator=generator),
        candidate_dense=torch.randn(num_candidates, len(spec.candidate_columns), generator=generator),
        histories=jagged(fields, field_lengths, num_requests),
        history_times=KeyedJaggedTensor(
            keys=[event.name for event in spec.histories],
            values=torch.cat([torch.zeros(0, dtype=torch.int64), *times]),
            lengths=torch.cat([torch.zeros(0, dtype=torch.int64), *event_lengths]),
            stride=num_requests,
        ),
        request_time=torch.full((num_requests,), 2000),
        candidate_offsets=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        labels=labels,
        weights=torch.ones_like(labels),
        group=torch.repeat_interleave(torch.arange(num_requests), counts),
        row=torch.arange(num_candidates),
        vendors=made,
    )

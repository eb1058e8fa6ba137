"""Ids and histories left out of training batches, so that a model learns to do without them.

An id becomes that of unknown ids, and a history is empty: what the model sees of new users and items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import UNKNOWN_ID, FeatureSpec, RequestBatch
from train.data.loading.sampling import uniform

POSITIONS = 1 << 16  # numbers drawn for the items of one row


def check_tables(id_dropout: Mapping[str, float], spec: FeatureSpec) -> None:
    """ValueError for a name that is no table's."""
    if unknown := sorted(id_dropout.keys() - spec.tables.keys()):
        tables = sorted(spec.tables)
        raise ValueError(
            f"data.id_dropout names {unknown[0]!r}; the tables are {', '.join(tables)}, e.g. "
            f"+data.id_dropout.{tables[0]}=0.1"
        )


def drop_ids(
    batch: RequestBatch, spec: FeatureSpec, shares: Mapping[str, float], seed: int, epoch: int
) -> RequestBatch:
    """The batch with shares of the ids of tables unknown, drawn by (seed, epoch, row, feature, position)."""
    first, vendors = _first_rows(batch, batch.candidate_offsets), batch.vendors
    fields = [(event.key(field), field.table) for event in spec.histories for field in event.fields]
    request = [(feature.name, feature.table) for feature in spec.request]
    candidate = [(feature.name, feature.table) for feature in spec.candidate]
    vendor = [(feature.name, feature.table) for feature in spec.vendor]

    def without(
        features: KeyedJaggedTensor, tables: Sequence[tuple[str, str]], rows: Tensor, salt: int
    ) -> KeyedJaggedTensor:
        parts = []
        for index, (name, table) in enumerate(tables):
            part = features[name]
            lengths = part.lengths().long()
            place = torch.arange(part.values().numel()) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
            drawn = uniform(torch.repeat_interleave(rows, lengths) * POSITIONS + place, seed, epoch, 1 + salt + index)
            parts.append(torch.where(drawn < shares.get(table, 0.0), UNKNOWN_ID, part.values()))
        return KeyedJaggedTensor(
            features.keys(),
            torch.cat(parts) if parts else features.values(),
            lengths=features.lengths(),
            stride=features.stride(),
        )

    if vendors is not None:
        rows, salt = _first_rows(batch, vendors.candidate_offsets), len(request) + len(candidate) + len(fields)
        vendors = replace(vendors, sparse=without(vendors.sparse, vendor, rows, salt))
    return replace(
        batch,
        vendors=vendors,
        request_sparse=without(batch.request_sparse, request, first, 0),
        candidate_sparse=without(batch.candidate_sparse, candidate, batch.row, len(request)),
        histories=without(batch.histories, fields, first, len(request) + len(candidate)),
    )


def drop_histories(batch: RequestBatch, share: float, seed: int, epoch: int) -> RequestBatch:
    """The batch with all histories of a share of its requests empty, drawn by (seed, epoch, row)."""
    kept = uniform(_first_rows(batch, batch.candidate_offsets), seed, epoch, 0) >= share

    def only(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not features.keys():
            return features
        lengths = features.lengths()
        stays = kept.repeat(len(features.keys()))
        return KeyedJaggedTensor(
            features.keys(),
            features.values()[torch.repeat_interleave(stays, lengths.long())],
            lengths=lengths * stays,
            stride=features.stride(),
        )

    return replace(batch, histories=only(batch.histories), history_times=only(batch.history_times))


def _first_rows(batch: RequestBatch, offsets: Tensor) -> Tensor:
    """[N] int64: the row of the first candidate of each request or vendor, by offsets [N + 1]; 0 without one."""
    starts = offsets[:-1].clamp(max=max(batch.num_candidates - 1, 0))
    return batch.row[starts] if batch.num_candidates else torch.zeros(len(starts), dtype=torch.int64)

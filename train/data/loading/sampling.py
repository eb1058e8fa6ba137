"""Negative down-sampling of training batches, and items drawn as negatives of next-item losses.

Kept negatives weigh 1 / rate, so loss, gradients and training metrics are unbiased estimates of those of all rows, and
predictions need no recalibration. He et al. ("Practical Lessons from Predicting Clicks on Ads at
Facebook", 2014) train without weights and correct each probability p to p / (p + (1 - p) / rate) instead. That holds
for a single task only: with several, a row that is negative in one task is always kept if it is positive in another, so
no single correction fits all negatives of a task, whereas a row's weight is right in every task.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modules.batch import FeatureSpec, RequestBatch, Vendors, owners, select_rows
from train.data.features.vocabulary import GOLDEN, splitmix64


def sample_negatives(batch: RequestBatch, rate: float, seed: int, epoch: int) -> RequestBatch:
    """The batch with a share `rate` of the candidates that are positive in no task, and all others.

    Weights of kept negatives are divided by the rate. Whether a candidate is kept depends only on (seed, epoch,
    its row), and not on batches, ranks or workers. Requests and vendors without a candidate left are left out.
    """
    positive = (batch.labels == 1).any(1)
    kept = positive | (uniform(batch.row, seed, epoch) < rate)
    counts = torch.bincount(batch.owner[kept], minlength=batch.num_requests)
    requests, candidates = counts.nonzero().squeeze(1), kept.nonzero().squeeze(1)
    vendors = batch.vendors
    if vendors is not None:
        whose = owners(vendors.candidate_offsets, batch.num_candidates)
        left = torch.bincount(whose[kept], minlength=vendors.num_vendors)
        of_request = torch.bincount(owners(vendors.offsets, vendors.num_vendors)[left > 0], minlength=len(counts))
        chosen = left.nonzero().squeeze(1)
        vendors = Vendors(
            sparse=select_rows(vendors.sparse, chosen),
            dense=vendors.dense[chosen],
            offsets=_offsets(of_request[requests]),
            candidate_offsets=_offsets(left[chosen]),
        )
    weights = torch.where(positive[:, None], batch.weights, batch.weights / rate)
    return RequestBatch(
        request_sparse=select_rows(batch.request_sparse, requests),
        candidate_sparse=select_rows(batch.candidate_sparse, candidates),
        request_dense=batch.request_dense[requests],
        candidate_dense=batch.candidate_dense[candidates],
        histories=select_rows(batch.histories, requests),
        history_times=select_rows(batch.history_times, requests),
        request_time=batch.request_time[requests],
        candidate_offsets=_offsets(counts[requests]),
        labels=batch.labels[candidates],
        weights=weights[candidates],
        group=batch.group[candidates],
        row=batch.row[candidates],
        vendors=vendors,
    )


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def uniform(row: Tensor, *key: int) -> Tensor:
    """A number in [0, 1) for each row int64, float64: that of SplitMix64's sequence for a key, as (seed, epoch)."""
    start = np.random.SeedSequence(key).generate_state(1, np.uint64)
    bits = splitmix64(start + row.numpy().astype(np.uint64) * GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def uniform_items(spec: FeatureSpec, count: int, key: tuple[int, ...]) -> Tensor:
    """[count] int64: rows of the candidates' table, each as likely as any other, none of the unknown id."""
    rows = spec.tables[spec.candidate[0].table]
    return torch.from_numpy(np.random.default_rng(key).integers(1, max(rows, 2), count))

"""A logistic model of two numbers, the user's and the movie's mean rating so far: what a model must at least reach."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.config.schema import Config, DataConfig
from train.data import build_source
from train.data.source import Source
from train.metrics import MetricSet


def train(config: Config, again: DataConfig | None = None) -> dict[str, Any]:
    """Fit to convergence, which no seed changes. Raises ValueError for data without the two means."""
    started = time.monotonic()
    source = build_source(config.data)
    features, labels, _ = _rates(source, "train")
    weights = torch.zeros(features.shape[1], labels.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(features @ weights, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    fitted = weights.detach()
    result: dict[str, Any] = {"step": 1, "best_step": 1}
    result |= {split: _evaluate(source, split, fitted) for split in ("valid", "test")}
    if again is not None:
        result["again_test"] = _evaluate(build_source(again), "test", fitted)
    return result | {"seconds": time.monotonic() - started}


def _evaluate(source: Source, split: str, weights: Tensor) -> dict[str, float]:
    features, labels, group = _rates(source, split)
    metrics = MetricSet(source.spec.tasks, source.label_rates(), torch.device("cpu"), exact_auc=True)
    metrics.update((features @ weights).float(), labels.float(), torch.ones_like(labels).float(), group)
    return metrics.compute()


def _rates(source: Source, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features [C, 3] (user's mean, movie's mean, 1), labels [C, tasks] and users [C]."""
    columns = {"user_mean": source.spec.request_dense, "movie_mean": source.spec.candidate_dense}
    if absent := [name for name, found in columns.items() if name not in found]:
        raise ValueError(f"the logistic model reads {' and '.join(columns)}; the data have no {absent[0]}")
    batch = source.batch(split, np.arange(source.num_requests(split)))
    user = batch.request_dense[batch.owner, source.spec.request_dense.index("user_mean")]
    movie = batch.candidate_dense[:, source.spec.candidate_dense.index("movie_mean")]
    features = torch.stack([user, movie, torch.ones_like(user)], 1).double()
    return features, batch.labels.double(), batch.group

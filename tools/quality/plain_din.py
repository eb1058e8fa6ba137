"""A DIN in plain PyTorch, as one writes it in an afternoon: padded histories, `nn.Embedding`, one Adam.

It reads the same batches as the models of this repository and nothing else of it: what these must not lose to.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch
from train.config.schema import Config, DataConfig
from train.data import build_source
from train.data.source import Source
from train.metrics import MetricSet
from train.process import length


class PlainDIN(nn.Module):
    """Logits [C, tasks]: embeddings of all ids, numbers, and for each event type a sum weighted by an MLP."""

    def __init__(self, spec: FeatureSpec, dim: int, std: float) -> None:
        super().__init__()
        self.spec = spec
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, dim) for name, rows in spec.tables.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=std)
        fields = [len(event.fields) for event in spec.histories]
        self.attention = nn.ModuleList(
            nn.Sequential(nn.Linear(4 * dim * n, 64), nn.SiLU(), nn.Linear(64, 1)) for n in fields
        )
        width = dim * (len(spec.request) + len(spec.candidate) + sum(fields))
        width += len(spec.request_columns) + len(spec.candidate_columns)
        self.mlp = nn.Sequential(
            nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, len(spec.tasks))
        )

    def forward(self, batch: RequestBatch) -> Tensor:
        owner = batch.owner
        request = [self.mean(batch.request_sparse[f.name], f.table)[owner] for f in self.spec.request]
        candidate = [self.mean(batch.candidate_sparse[f.name], f.table) for f in self.spec.candidate]
        tables = [f.table for f in self.spec.candidate]
        pooled = []
        for event, mlp in zip(self.spec.histories, self.attention, strict=True):
            lengths = batch.histories[event.keys[0]].lengths()
            mask = torch.arange(max(1, int(lengths.max())), device=lengths.device) < lengths[:, None]
            keys = []
            for key, field in zip(event.keys, event.fields, strict=True):
                ids = torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
                ids[mask] = batch.histories[key].values().long()
                keys.append(self.tables[field.table](ids))
            key = torch.cat(keys, -1)[owner]
            mean = torch.stack(candidate).mean(0)
            query = torch.cat(
                [candidate[tables.index(f.table)] if f.table in tables else mean for f in event.fields], -1
            )[:, None].expand_as(key)
            weight = mlp(torch.cat([query, key, query - key, query * key], -1)) * mask[owner][..., None]
            pooled.append((weight * key).sum(1))
        dense = [batch.request_dense[owner], batch.candidate_dense]
        return self.mlp(torch.cat([*request, *candidate, *pooled, *dense], 1))

    def mean(self, ids: Any, table: str) -> Tensor:
        lengths = ids.lengths().long()
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        total = torch.zeros(len(lengths), self.tables[table].embedding_dim, device=lengths.device)
        return total.index_add(0, rows, self.tables[table](ids.values().long())) / lengths.clamp(min=1)[:, None]


def train(config: Config, again: DataConfig | None = None) -> dict[str, Any]:
    """Train by Adam for the epochs, batches and validations of a configuration, at its rate; best by NE.

    The best weights are evaluated on `again`'s test split, too, if it is given.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and config.runtime.device != "cpu" else "cpu")
    torch.manual_seed(config.runtime.seed)
    source = build_source(config.data)
    length.settle(config, source.num_requests("train"), source.num_requests("valid") > 0)
    std = config.model.table_std or 1 / math.sqrt(config.model.dim)
    model = PlainDIN(source.spec, config.model.dim, std).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.lr)
    best: dict[str, Any] = {}
    total, size, started = source.num_requests("train"), config.data.batch_size, time.monotonic()
    marks = {
        round(total * part / config.runtime.evals_per_epoch) for part in range(1, config.runtime.evals_per_epoch + 1)
    }
    step = 0
    for epoch in range(config.runtime.epochs):
        order = np.random.default_rng((config.runtime.seed, epoch)).permutation(total)
        for begin in range(0, total, size):
            model.train()
            batch = source.batch("train", order[begin : begin + size]).to(device)
            logits, seen = model(batch), ~batch.labels.isnan()
            loss = nn.functional.binary_cross_entropy_with_logits(logits[seen], batch.labels[seen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if any(begin < mark <= begin + size for mark in marks):
                valid = evaluate(model, source, "valid", size, device)
                ne = np.mean([valid[f"{task}/ne"] for task in source.spec.tasks])
                if not best or ne < best["ne"]:
                    best = {
                        "ne": ne,
                        "valid": valid,
                        "best_step": step,
                        "test": evaluate(model, source, "test", size, device),
                    }
                    if again is not None:
                        best["again_test"] = evaluate(model, build_source(again), "test", size, device)
    seconds = time.monotonic() - started
    return {"step": step, "seconds": seconds} | {key: value for key, value in best.items() if key != "ne"}


@torch.no_grad()
def evaluate(model: PlainDIN, source: Source, split: str, size: int, device: torch.device) -> dict[str, float]:
    model.eval()
    metrics = MetricSet(source.spec.tasks, source.label_rates(), device, exact_auc=True)
    for numbers in np.array_split(np.arange(source.num_requests(split)), -(-source.num_requests(split) // (2 * size))):
        batch = source.batch(split, numbers).to(device)
        metrics.update(model(batch), batch.labels, batch.weights, batch.group)
    return metrics.compute()

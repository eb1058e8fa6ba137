"""GDPA is worth its price only where its activation bends: where scores are small, a smooth one is a straight line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import modules.layers.attention.gdpa
from kernels.core.activations import activate
from modules.config import ModelConfig
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import CONFIGS, build
from tests.modules.factories import random_batch, random_spec

LENGTH = 500  # of the longest history that the model is built for, as in `synthetic_h200_gdpa`
BENT = 0.1
"""Share of the variance of act(s) that no straight line in s explains: a third for GELU of normal scores, 0.0002 where
their deviation is 0.02."""


def bend(activation: str, scores: Tensor) -> float:
    """1 - R^2 of the best straight line through (s, act(s))."""
    correlation = torch.stack([scores, activate(activation, scores)]).corrcoef()[0, 1]
    return float(1 - correlation.square())


@pytest.fixture
def bends(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bend of each call of the operator, over all pairs of a query and a key of its row."""
    found: list[float] = []
    operator: Callable[..., Tensor] = modules.layers.attention.gdpa.gdpa

    def watched(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, **named: Any
    ) -> Tensor:
        with torch.no_grad():
            pieces = k.double() if k_offsets is None else k.double().split(k_offsets.diff().tolist())
            rows = q.double()  # without offsets every row has the same queries
            queries = [rows] * len(pieces) if q_offsets is None else rows.split(q_offsets.diff().tolist())
            pairs = [torch.einsum("qhd,khd->qkh", x, y).flatten() for x, y in zip(queries, pieces, strict=True)]
            found.append(bend(named["activation"], named["score_scale"] * torch.cat(pairs)))
        return operator(q, k, v, q_offsets, k_offsets, **named)

    monkeypatch.setattr(modules.layers.attention.gdpa, "gdpa", watched)
    return found


def train(config: ModelConfig, steps: int = 5) -> None:
    torch.manual_seed(0)
    spec = random_spec(max_length=LENGTH)
    arch, embedding = build(config, spec), FeatureEmbedding(spec, config.dim, "cpu")
    optimizer = torch.optim.AdamW([*arch.parameters(), *embedding.parameters()], lr=1e-3)
    batch = random_batch(spec, (2, 1, 1, 3), lengths=(20, 5, 9, 14))
    for _ in range(steps):
        optimizer.zero_grad()
        logits = arch(embedding(batch), batch)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()


GDPA = {"pffn": "gdpa", "sequence_attention": "gdpa"}
MODELS = {"interformer": GDPA, "kunlun": {}, "gem": {}}


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_a_trained_model_leave_the_linear_range(name: str, bends: list[float]) -> None:
    train(CONFIGS[name.split()[0]](**MODELS[name]))
    assert bends
    assert min(bends) > BENT


def test_small_scores_would_be_found(bends: list[float]) -> None:
    tau = {"score_scale": 1 / LENGTH, "out_scale": 1.0}  # beside the norms of queries and keys
    options = modules.layers.attention.gdpa.GDPAConfig(**tau)
    train(CONFIGS["interformer"](**GDPA, pffn_gdpa=options, attention_gdpa=options), steps=1)
    assert max(bends) < BENT / 10

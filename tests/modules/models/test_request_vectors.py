"""Ranking models give a vector of each request, of a known width, that depends on no candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import RequestBatch
from modules.config import ModelConfig
from modules.layers.embedding.local import LocalEmbedding
from modules.models import MODELS, build
from modules.models.baselines import DIN, DLRM, DCNv2
from modules.models.gem import GEM
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from modules.models.onetrans import OneTransConfig
from modules.models.ranking import RequestVectors
from modules.models.retrieval import RetrievalModel
from modules.models.token_mixing import TokenMixingConfig
from modules.models.ultra_hstu import UltraHSTUConfig
from modules.models.wukong import Wukong
from tests.modules.factories import random_batch, random_spec, vendor_spec

SPEC = vendor_spec()
# The request's tokens are those of the user and of its numbers; two event types have two fields each.
WIDTHS: list[tuple[ModelConfig, int]] = [
    (InterFormer.Config(dim=8, num_cls=3, num_recent=2), (3 + 2) * 8),
    (Kunlun.Config(dim=8, num_tokens=3, event_stacks="merged"), 3 * 8),
    (
        Kunlun.Config(dim=8, num_tokens=2, num_layers=3, events={"event0": {"num_tokens": 3, "num_layers": 2}}),
        (3 + 2) * 8,
    ),
    (GEM.Config(dim=8, levels=[4], num_tokens=3), 2 * 3 * 8),
    (Wukong.Config(dim=8), (2 + 4) * 8),
    (DCNv2.Config(dim=8), (2 + 4) * 8),
    (DLRM.Config(dim=8), (2 + 4) * 8),
    (DIN.Config(dim=8), 2 * 8),
    (TokenMixingConfig(dim=8, token_dim=16, user_tokens=3), 3 * 16),
    (TokenMixingConfig(dim=8, token_dim=16, sequences="heads", user_tokens=3), 3 * 16),
    (TokenMixingConfig(dim=8, token_dim=16, one_way=False), (2 + 4) * 8),
    (OneTransConfig(dim=8, token_dim=16, num_layers=2, last_events=3, length_multiple=2), 16),
    (OneTransConfig(dim=8, token_dim=16, request_tokens=2), 16),
    (UltraHSTUConfig(dim=8, token_dim=16, request_tokens=2, layers=[{}, {"newest": 3}]), 2 * 16),
    (UltraHSTUConfig(dim=8, token_dim=16, num_layers=1, event_stacks="own"), 2 * 16),
]


def other_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    moved = [feature.values().roll(1) for feature in features.to_dict().values()]
    return KeyedJaggedTensor(features.keys(), torch.cat(moved), lengths=features.lengths(), stride=features.stride())


def test_every_ranking_model_is_here() -> None:
    ranking = {name for name, model in MODELS.items() if not issubclass(model, RetrievalModel)}
    assert {config.name for config, _ in WIDTHS} == ranking


@pytest.mark.parametrize(("config", "width"), WIDTHS, ids=lambda each: getattr(each, "name", None))
def test_a_request_has_one_vector_whatever_its_candidates_are(config: ModelConfig, width: int) -> None:
    torch.manual_seed(0)
    spec = SPEC if getattr(MODELS[config.name], "takes_vendors", False) else random_spec()
    embedding, arch = LocalEmbedding(spec, 8).eval(), build(config, spec).eval()
    batch = random_batch(spec, lengths=(3, 0, 6, 1, 2))
    candidates = other_ids(batch.candidate_sparse)
    others = replace(batch, candidate_sparse=candidates, candidate_dense=batch.candidate_dense + 1)
    other_histories = replace(batch, histories=other_ids(batch.histories))
    assert isinstance(arch, RequestVectors)
    assert arch.vectors_refusal() is None

    def of(given: RequestBatch) -> torch.Tensor:
        with torch.no_grad():
            return arch(embedding(given), given)

    logits = of(batch)
    arch.gives_vectors = True
    found = of(batch)
    assert found.shape == (5, width)
    torch.testing.assert_close(of(others), found, rtol=0, atol=0)
    assert (of(other_histories) != found).any() == (config.name != "din")
    assert len({tuple(row) for row in found.tolist()}) == 5
    arch.train()
    assert of(batch).shape == logits.shape
    arch.eval().gives_vectors = False
    torch.testing.assert_close(of(batch), logits, rtol=0, atol=0)
    assert (of(others) != logits).any()


@pytest.mark.parametrize(
    ("config", "num_events", "reason"),
    [
        (InterFormer.Config(dim=8, sequence_context="candidate"), 2, "every candidate has a sequence of its own"),
        (Kunlun.Config(dim=8), 0, "without histories it has no summaries"),
        (GEM.Config(dim=8), 0, "without histories it has no summaries"),
        (OneTransConfig(dim=8), 0, "or use model.request_tokens=1"),
    ],
)
def test_one_without_such_vectors_says_why(config: ModelConfig, num_events: int, reason: str) -> None:
    arch = build(config, random_spec(num_events))
    assert isinstance(arch, RequestVectors)
    assert reason in (arch.vectors_refusal() or "")

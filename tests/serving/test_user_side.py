"""User sides that are kept between requests: which request has which, how many bytes, and when they are forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modules.batch import RequestBatch
from modules.config import ModelConfig
from modules.models import MODELS
from modules.models.baselines import DIN
from modules.pretrained import PretrainedModel
from tests.serving.conftest import MOST, Rows
from train.checkpoint.publish import Place, Publisher
from train.commands.export import export_model
from train.serving.following import Follower
from train.serving.scorer import Scorer
from train.serving.user_side import UserSides

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
DCN = MODELS["dcnv2"].Config(dim=8)  # type: ignore[operator]


def later(batch: RequestBatch, seconds: int) -> RequestBatch:
    return replace(batch, request_time=batch.request_time + seconds)


def test_another_request_history_or_number_has_another_user_side(ranking: Rows, exported: Export) -> None:
    scorer = Scorer(exported(DCN, ranking)[0], user_side_bytes=1 << 20)
    sides, batch = scorer.user_sides, ranking.batch([90])
    assert sides is not None
    first = scorer(batch)
    assert torch.equal(scorer(batch), first)
    assert (sides.hits, sides.misses) == (1, 1)
    assert torch.equal(scorer(later(batch, 60)), first)  # this model does not read how old events are
    assert (sides.hits, sides.misses) == (2, 1)
    events, ids = batch.histories, batch.request_sparse
    kind = type(events)
    histories = replace(
        batch, histories=kind(keys=events.keys(), values=events.values().flip(0), lengths=events.lengths(), stride=1)
    )
    users = replace(
        batch, request_sparse=kind(keys=ids.keys(), values=ids.values() % 2 + 1, lengths=ids.lengths(), stride=1)
    )
    for misses, other in enumerate((histories, users, ranking.batch([3])), start=2):
        plain = scorer(other)
        scorer.user_sides = None
        assert torch.equal(plain, scorer(other))
        scorer.user_sides = sides
        assert sides.misses == misses
    scorer(ranking.batch([3, 90]))  # several requests of a call are scored together
    assert (sides.hits, sides.misses) == (2, 4)


def test_what_is_kept_has_so_many_bytes_and_the_oldest_go(ranking: Rows) -> None:
    sides = UserSides(100, by_age=False)
    for name in (b"a", b"b", b"c"):
        sides.put(name, [torch.zeros(10), 7])
        sides.get(b"a")
    assert sides.bytes == 80
    assert [sides.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    sides.put(b"d", [torch.zeros(50)])
    assert (sides.bytes, sides.get(b"d")) == (80, None)
    metrics = sides.metrics()
    assert metrics["gemsmith_user_side_hits"][1] == 5
    assert metrics["gemsmith_user_side_age_seconds"][1] >= 0


def test_new_weights_have_new_user_sides(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(DCN, ranking)
    scorer, batch = Scorer(folder, user_side_bytes=1 << 20), ranking.batch([60])
    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(each, scorer(batch)) for each in threads.map(scorer, [batch] * 8))
    state = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}
    Publisher(Place(tmp_path), "run", ranking.source.fingerprint).publish(state, 1)
    assert Follower(scorer, tmp_path).look()
    kept = scorer(batch)
    scorer.user_sides = None
    assert torch.equal(kept, scorer(batch))


def test_a_model_that_is_served_eagerly_keeps_none(ranking: Rows, exported: Export) -> None:
    folder, _ = exported(DIN.Config(dim=8, hidden=[16]), ranking)
    with pytest.raises(ValueError, match="served in eager PyTorch.*user_side_bytes=0"):
        Scorer(folder, user_side_bytes=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_replay_both_halves_and_follow_new_weights(ranking: Rows, tmp_path: Path) -> None:
    spec = dataclasses.replace(ranking.source.spec, max_candidates=MOST)
    model = PretrainedModel(DCN, spec).eval().to("cuda")
    export_model(tmp_path / "export", model, ranking.source, ranking.config, {}, torch.float32, compiling=False)
    scorer, batch = Scorer(tmp_path / "export", user_side_bytes=1 << 20), ranking.batch([60])
    sides = scorer.user_sides
    assert sides is not None
    (tmp_path / "to").mkdir()
    follower, publisher = Follower(scorer, tmp_path / "to"), Publisher(Place(tmp_path / "to"), "run", "")
    scorer.data_fingerprint = ""
    for step in range(3):
        state = {
            name: value + step if value.is_floating_point() else value for name, value in model.state_dict().items()
        }
        publisher.publish(state, step)
        assert follower.look()
        reference = PretrainedModel(DCN, spec).eval().to("cuda")
        reference.load_state_dict(state)
        with torch.no_grad():
            expected = reference(batch.to(torch.device("cuda"))).sigmoid()
        for kept in (sides, None):
            scorer.user_sides = kept
            for _ in range(5):  # from the third on, graphs are replayed
                torch.testing.assert_close(scorer(batch), expected, atol=1e-5, rtol=1e-4)
            sides.clear()
        scorer.user_sides = sides

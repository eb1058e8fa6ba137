"""Every model can be exported and scores requests, one at a time and several in a call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.config import ModelConfig
from modules.models import MODELS, CustomConfig
from modules.models.baselines import DIN
from modules.models.gem import GEM
from modules.models.hstu import HSTU
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from modules.models.onetrans import OneTransConfig
from modules.models.sasrec import SASRec
from modules.models.token_mixing import TokenMixingConfig
from modules.models.two_tower import TwoTower
from modules.models.ultra_hstu import UltraHSTUConfig
from modules.models.wukong import Wukong
from modules.pretrained import PretrainedModel
from tests.serving.conftest import MOST, Rows
from train.commands.export import export_model
from train.serving.scorer import Scorer, read_about
from train.serving.service import Service

SMALL: dict[str, Any] = {"dim": 8, "num_layers": 1}
HEADS: dict[str, Any] = {"interaction_hidden": [16], "head_hidden": [16]}
GEMS: dict[str, Any] = {**SMALL, **HEADS, "pffn_hidden": 8, "window": 2, "levels": [3]}
MIXING: dict[str, Any] = {"dim": 8, "token_dim": 16, "head_dim": 4, "head_hidden": [16]}
TRACED = {
    "interformer": InterFormer.Config(**SMALL, **HEADS, feed_forward="moe", plain_head=True),
    "wukong": Wukong.Config(**SMALL, hidden=[16], head_hidden=[16]),
    "token_mixing": TokenMixingConfig(**MIXING, mixing="revert", global_token=True, lower_weight=0.1, num_layers=2),
    "dcnv2": MODELS["dcnv2"].Config(dim=8),  # type: ignore[operator]
    "dlrm": MODELS["dlrm"].Config(dim=8, jagged_interaction=True),  # type: ignore[operator]
    "own": CustomConfig(name="served_models.Dot", dim=8),
}
EAGER = {
    "din": DIN.Config(dim=8, hidden=[16]),
    "interformer of candidates": InterFormer.Config(**SMALL, **HEADS, sequence_context="candidate"),
    "gem of domains": GEM.Config(**GEMS, domain_feature="country"),
    "own that reads": CustomConfig(name="served_models.Dot", dim=8, arguments={"reads": True}),
}
# On one history of items: next-item models read nothing else, and others are traced sooner.
OF_ITEMS = {
    "sasrec": SASRec.Config(**SMALL),
    "hstu": HSTU.Config(**SMALL),
    "two_tower": TwoTower.Config(dim=8, hidden=[8]),
    "kunlun": Kunlun.Config(
        dim=8, **HEADS, pffn_hidden=8, window=2, num_experts=1, layers=[{"num_seeds": 4}, {"num_heads": 1, "window": 3}]
    ),
    "gem": GEM.Config(**GEMS),
    "token_mixing that adds": TokenMixingConfig(
        **MIXING, num_layers=1, mixing="add", norm="post", feed_forward="gelu", sequences="target"
    ),
    "token_mixing of queries": TokenMixingConfig(
        **MIXING, num_layers=1, sequences="queries", encoding="newest", num_newest=2
    ),
    "token_mixing of heads": TokenMixingConfig(
        **MIXING, num_layers=1, sequences="heads", tokens="split", merge_events=True
    ),
    "ultra_hstu": UltraHSTUConfig(dim=8, token_dim=8, window=2, time_buckets=4, layers=[{}, {"newest": 3}]),
    "onetrans": OneTransConfig(dim=8, token_dim=16, last_events=2, length_multiple=1, request_tokens=2, num_layers=2),
}
BY_AGE = ("hstu", "kunlun", "sasrec", "ultra_hstu")
"""Models whose user side is known by how old events are: that of SASRec has their times, and makes nothing of them."""
ALL = TRACED | EAGER | OF_ITEMS


def test_every_model_is_among_them() -> None:
    assert {config.name for config in ALL.values()} >= set(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_model_is_exported_and_scores(
    name: str,
    ranking: Rows,
    next_items: Rows,
    exported: Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]],
    own_models: Path,
) -> None:
    rows = next_items if name in OF_ITEMS else ranking
    folder, model = exported(ALL[name], rows)
    about = read_about(folder)
    if name in EAGER:
        assert about["program"] is None
        assert not (folder / "model.pt2").exists()
        assert about["eager"]
    else:
        assert (about["program"], about["eager"]) == ("model.pt2", None)
    service = Service.from_pretrained(folder, 0 if name in EAGER else 1 << 20)
    scorer, sides = service.scorer, service.scorer.user_sides
    assert scorer.weights().keys() == model.state_dict().keys()
    scorer.user_sides = None
    assert scorer.traced == (name not in EAGER)
    numbers = [90, 3, 60]
    with torch.no_grad():
        expected = model(rows.batch(numbers)).sigmoid()
    together = service([rows.request(number) for number in numbers])
    alone = [service([rows.request(number)])[0] for number in numbers]
    for predictions in (together, alone):
        columns = [[value for each in predictions for value in each[task]] for task in service.tasks]
        torch.testing.assert_close(torch.tensor(columns).T, expected, atol=1e-5, rtol=1e-4)
    if sides is not None:
        first = rows.batch([90])
        later = dataclasses.replace(first, request_time=first.request_time + 10**6)
        for batch in (first, rows.batch([3]), later):
            fresh = scorer(batch)
            scorer.user_sides = sides
            assert torch.equal(scorer(batch), fresh)  # computed in two halves
            assert torch.equal(scorer(batch), fresh)  # the first one kept
            scorer.user_sides = None
        assert sides.hits + sides.misses == 6
        assert sides.misses == (3 if name in BY_AGE else 2)
    assert service([{**rows.request(3), "candidates": []}]) == [{task: [] for task in service.tasks}]


def test_copies_in_a_model_of_ones_own_are_rewritten_on_request(
    ranking: Rows, tmp_path: Path, own_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = dataclasses.replace(ranking.source.spec, max_candidates=MOST)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-5)):
        model = PretrainedModel(TRACED["own"], spec).eval()
        export_model(tmp_path, model, ranking.source, ranking.config, {}, dtype, rewriting=True)
        said = capsys.readouterr().out
        assert "broadcasts found: index\nswapped mul" in said
        assert "-> jagged_dense_elementwise" in said
        with torch.no_grad():
            expected = model(ranking.batch([90])).sigmoid()
        (predictions,) = Service.from_pretrained(tmp_path)([ranking.request(90)])
        actual = torch.tensor([predictions[task] for task in ("click", "like")]).T
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        assert Scorer(tmp_path).weights().keys() == model.state_dict().keys()
    model = PretrainedModel(EAGER["din"], spec)
    with pytest.raises(ValueError, match=r"rewrite=true .*model\.name=din copies no request"):
        export_model(tmp_path, model, ranking.source, ranking.config, {}, dtype, rewriting=True)


def test_why_a_model_is_served_eagerly_is_said_once(
    ranking: Rows, tmp_path: Path, own_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = dataclasses.replace(ranking.source.spec, max_candidates=MOST)
    model = PretrainedModel(EAGER["din"], spec).eval()
    (tmp_path / "model.pt2").write_text("of an earlier export")
    export_model(tmp_path, model, ranking.source, ranking.config, {}, torch.float32)
    reason = read_about(tmp_path)["eager"]
    assert reason.startswith("its sizes depend on its data: ")
    said = capsys.readouterr().out
    assert said == f"din cannot be traced and is served in eager PyTorch ({reason})\n"
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interformer", "din"])
def test_a_request_has_no_events_one_candidate_or_as_many_as_were_exported(
    name: str, ranking: Rows, exported: Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
) -> None:
    folder, model = exported(ALL[name], ranking)
    service = Service.from_pretrained(folder)
    request = ranking.request(90)
    few = {**request, "candidates": request["candidates"][:1], "histories": {"seen": [], "recent": []}}
    many = {**request, "candidates": request["candidates"][:1] * MOST}
    for asked in ([few], [many], [few, many, few]):
        with torch.no_grad():
            expected = model(service.read.batch(asked)).sigmoid()[:, 0]
        actual = [value for each in service(asked) for value in each["click"]]
        torch.testing.assert_close(torch.tensor(actual), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=f"0 to {MOST} candidates here, got {MOST + 1}.*max_candidates={MOST + 1}"):
        service([few, {**request, "candidates": request["candidates"][:1] * (MOST + 1)}])


def test_a_program_of_ones_own_model_needs_no_code_and_takes_requests_one_by_one(
    ranking: Rows,
    exported: Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]],
    own_models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, model = exported(ALL["own"], ranking)
    reads, _ = exported(ALL["own that reads"], ranking)
    monkeypatch.delitem(__import__("sys").modules, "served_models")
    batch = ranking.batch([90, 3, 60])
    with torch.no_grad():
        torch.testing.assert_close(Scorer(folder)(batch), model(batch).sigmoid())
    with pytest.raises(ValueError, match=r"a model of your own, served_models\.Dot.*import served_models first"):
        Scorer(reads)


def test_a_task_of_several_classes_has_a_list_for_each_candidate(ranking: Rows, tmp_path: Path) -> None:
    spec = dataclasses.replace(ranking.source.spec, outputs=(3, 1), max_candidates=MOST)
    model = PretrainedModel(ALL["dlrm"], spec).eval()
    tasks = {"click": {"loss": "classes", "number": 3}}
    export_model(tmp_path, model, ranking.source, ranking.config, tasks, torch.float32)
    (predictions,) = Service.from_pretrained(tmp_path)([ranking.request(3)])
    assert all(sum(each) == pytest.approx(1) and len(each) == 3 for each in predictions["click"])
    assert all(0 < each < 1 for each in predictions["like"])
    assert json.loads((tmp_path / "config.json").read_text())["spec"]["outputs"] == [3, 1]

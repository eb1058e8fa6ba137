"""`train.evaluate` on a checkpoint, and `train.commands.compare` on two arms, on one rank and on two."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import ndcg_score
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.core import dispatch
from modules.batch import select_rows, with_candidates
from tests.launching import TINY, TINY_DLRM, train_ranks
from tests.processes import run_ranks
from train import evaluate
from train.build import load_model
from train.checkpoint import load as checkpoint
from train.checkpoint.load import read_meta
from train.commands import compare, export, importance, score
from train.config.compose import from_dict
from train.data import build_source
from train.metrics.predictions import read_predictions
from train.serving.scorer import Scorer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train_ranks(2, run_dir, "runtime.steps=3", base=TINY_DLRM)
    return run_dir


def test_evaluate_scores_a_checkpoint_again(trained: Path, tmp_path: Path) -> None:
    (checkpoint,) = (trained / "checkpoints").glob("step_????????")
    options = [f"out={tmp_path / 'scored'}", "runtime.device=cpu"]
    run_ranks(evaluate.main, 2, [f"checkpoint={checkpoint}", "split=test", *options])
    metrics = json.loads((tmp_path / "scored" / "metrics.json").read_text())
    expected = json.loads((trained / "results.json").read_text())["test"]
    assert metrics == expected
    table = pq.read_table(tmp_path / "scored" / "predictions")
    assert table.column_names[:5] == ["row", "request", "group", "events", "weight"]
    source = build_source(from_dict(read_meta(checkpoint)["config"], []).data)
    batch = source.batch("test", np.arange(source.num_requests("test")))
    lengths = batch.history_times.lengths().view(-1, batch.num_requests).sum(0)[batch.owner].tolist()
    assert dict(zip(table["row"].to_pylist(), table["events"].to_pylist(), strict=True)) == dict(
        zip(batch.row.tolist(), lengths, strict=True)
    )
    assert table.num_rows == metrics["click/examples"]
    evaluate.main([f"run_dir={trained}", *options])
    again = pq.read_table(tmp_path / "scored" / "predictions")
    assert again.num_rows == table.num_rows  # the file of the second rank is gone
    probability = table["click_probability"].to_numpy()
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-table["click_logit"].to_numpy())), rtol=1e-6)


def test_requests_are_ranked_and_found_in_the_predictions(trained: Path, tmp_path: Path) -> None:
    options = [f"out={tmp_path}", "runtime.device=cpu", "data.candidates=4", "tracking.top_k=[1,2]"]
    metrics = evaluate.main([f"run_dir={trained}", *options])
    columns = read_predictions(tmp_path / "predictions")
    expected = []
    for request in np.unique(columns["request"]):
        own = columns["request"] == request
        assert columns["row"][own].tolist() == list(range(request, request + 4))
        label, logit = columns["click_label"][own], columns["click_logit"][own]
        if 0 < label.sum() < 4:
            expected.append(ndcg_score([label], [logit], k=2))
    assert metrics["click/ranked_requests"] == len(expected) > 10
    assert metrics["click/ndcg@2"] == pytest.approx(np.mean(expected))


def test_every_feature_of_a_run_has_a_worth(trained: Path, tmp_path: Path) -> None:
    run_ranks(importance.main, 2, [f"run_dir={trained}", "steps=2", f"out={tmp_path}", "runtime.device=cpu"])
    worth = json.loads((tmp_path / "importance.json").read_text())
    spec = build_source(from_dict(read_meta(checkpoint.resolve(str(trained), ""))["config"], []).data).spec
    assert worth.keys() == set(importance.features_of(spec))
    assert all(value is not None for values in worth.values() for value in values.values())


def test_an_exported_model_scores_requests_as_the_run_did(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.main([f"run_dir={trained}", f"out={tmp_path / 'exported'}", "max_candidates=32", "runtime.device=cpu"])
    scorer = Scorer(tmp_path / "exported")
    (path,) = (trained / "checkpoints").glob("step_????????")
    source = build_source(from_dict(read_meta(path)["config"], []).data)
    predictions = pq.read_table(trained / "predictions" / "test").to_pydict()
    expected = dict(zip(predictions["row"], predictions["click_probability"], strict=True))
    for number in range(8):
        request = source.batch("test", np.array([number]))
        scores = scorer(request)[:, scorer.spec.tasks.index("click")]
        # Both in bfloat16, in batches that round elsewhere.
        np.testing.assert_allclose(scores, [expected[row] for row in request.row.tolist()], rtol=2e-2)
    one = with_candidates(source.batch("test", np.array([0])), 1)
    assert scorer(one).shape == (1, len(scorer.spec.tasks))
    with pytest.raises(ValueError, match="0 to 32 candidates here, got 33"):
        scorer(with_candidates(one, 33))
    event, short = scorer.spec.histories[0], export.example(source)
    times = event.max_length + 1
    long = replace(
        short, histories=repeated(short.histories, times), history_times=repeated(short.history_times, times)
    )
    length = times * int(short.history_times.lengths()[0])
    with pytest.raises(ValueError, match=f"{length} events of type '{event.name}', more than the {event.max_length}"):
        scorer(long)
    with pytest.raises(ValueError, match="holds no exported model"):
        Scorer(tmp_path)
    monkeypatch.setattr(score, "Scorer", lambda folder: scorer)  # which takes seconds to load
    with pytest.raises(ValueError, match="request=12000 must be a number from 0 to "):
        score.main([f"export={tmp_path / 'exported'}", "request=12000"])
    rows = score.main([f"export={tmp_path / 'exported'}", "candidates=2,32", "broadcast_limit=2", "request=1"])
    own = {"candidates", "exported_ms", "eager_ms"}
    assert [set(row) for row in rows] == [own | {"broadcast_ms"}, own]

    monkeypatch.setattr(score.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    model = load_model(path, from_dict(read_meta(path)["config"], []), source, 32, torch.device("cpu"))
    score.check(tmp_path / "exported", model, torch.bfloat16, short)
    with torch.no_grad():
        for parameter in model.arch.parameters():
            parameter.add_(1)
    with pytest.raises(RuntimeError, match="for 1 of a request's candidates it does not give the model's scores"):
        score.check(tmp_path / "exported", model, torch.bfloat16, short)


def repeated(features: KeyedJaggedTensor, times: int) -> KeyedJaggedTensor:
    """The lists of one request, each so often behind itself."""
    copies = select_rows(features, torch.zeros(times, dtype=torch.long))
    return KeyedJaggedTensor(features.keys(), copies.values(), lengths=copies.lengths().view(-1, times).sum(1))


class Rising:
    """A source whose requests have more events the later they come, but for the last thousand, which have one."""

    spec = SimpleNamespace(histories=[SimpleNamespace(name="often"), SimpleNamespace(name="seldom")])

    def __init__(self, count: int, growth: int = 500) -> None:
        self.count, self.growth, self.looked_at = count, growth, 0

    def num_requests(self, split: str) -> int:
        return self.count

    def batch(self, split: str, requests: np.ndarray) -> SimpleNamespace:
        self.looked_at += len(requests)
        rare = np.where(requests < self.count - 1000, 1 + requests // self.growth, 1)
        lengths = torch.from_numpy(np.concatenate([np.full(len(requests), 4), rare]))
        offsets = torch.arange(len(requests) + 1)
        times = SimpleNamespace(lengths=lambda: lengths)
        return SimpleNamespace(history_times=times, candidate_offsets=offsets, num_candidates=2, numbers=requests)


def test_export_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"the newest 3 is one\. Types that no request has two events of: seldom;"):
        export.example(cast(Any, Rising(3)))
    never = Rising(10**9, growth=10**9)
    with pytest.raises(ValueError, match=r"the newest 100,000 is one\."):
        export.example(cast(Any, never))
    assert never.looked_at == 100_000
    for arguments, message in (
        (["out=x"], "name a run or one of its checkpoints"),
        (["run_dir=nowhere"], "holds no whole checkpoint"),
        (["run_dir"], "is not key=value"),
        (["run_dir=x", "compile=no"], "compile=no must be true or false"),
        (["run_dir=x", "max_candidates=one"], "max_candidates=one must be a number of at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            export.main(arguments)
    with pytest.raises(ValueError, match="is not one of export="):
        score.main(["run_dir=x"])
    with pytest.raises(ValueError, match="candidates=10,ten must be numbers of at least 1"):
        score.main(["export=x", "candidates=10,ten"])


def test_an_export_is_made_from_the_newest_requests_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "with_candidates", lambda request, count: request)
    request = export.example(cast(Any, Rising(2500)))  # its last thousand and the thousand before
    assert cast(Any, request).numbers.tolist() == [1000]


def test_evaluate_names_what_is_wrong(tmp_path: Path) -> None:
    for arguments, said in ((["split=test"], "checkpoint=PATH$"), (["run_dir=x", "checkpoint=y"], "not both$")):
        with pytest.raises(ValueError, match=f"name a run or one of its checkpoints.*{said}"):
            evaluate.main(arguments)
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        evaluate.main(["run_dir=nowhere"])
    with pytest.raises(ValueError, match="nowhere"):
        evaluate.main(["checkpoint=nowhere"])


def test_compare_writes_a_report(tmp_path: Path) -> None:
    options = ["runtime.device=cpu", "--seeds", "0", "1", "--budget", "100", "--out", str(tmp_path / "report")]
    quantise = ["runtime.steps=3", "model.dim=32", "model.hidden=[32]"]
    run_ranks(compare.main, 2, [*TINY_DLRM, *quantise, *options])
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["seeds"] == [0, 1]
    with pytest.raises(ValueError, match="holds another comparison"):
        compare.main([*TINY_DLRM, "model.dim=64", *options])
    for task in ("click", "like"):
        values = report["tasks"][task]
        assert [row["seed"] for row in values["per_seed"]] == [0, 1]
        gap = values["per_seed"][0]["ne_percent"]
        assert gap["low"] <= gap["estimate"] <= gap["high"]
        assert values["ne_gap_percent"] != 0  # the arms differ
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Verdict" in text
    assert "Evaluated on MXFP8 operands as well" in text
    assert (tmp_path / "report" / "loss.png").stat().st_size > 0
    # Same initial weights and batches: the first losses differ by rounding alone, about 2^-4 of a logit's spread.
    first = [report_losses(tmp_path / "report" / "seed-0" / arm)[0] for arm in ("bf16", "mxfp8")]
    assert first[0] == pytest.approx(first[1], rel=0.02)


def report_losses(run_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["values"]["loss"] for record in records if record["split"] == "train"]


def test_arms_of_one_name_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main([*TINY, "--arms", "a:optimizer.lr=0.1", "a:optimizer.lr=0.5"])
    assert "different names" in capsys.readouterr().err


@pytest.mark.parametrize(("override", "unlike"), [("model.dim=32", "arch"), ("data.seed=1", "data_fingerprint")])
def test_arms_without_common_weights_are_refused_before_they_train(override: str, unlike: str) -> None:
    arms = [compare.Arm("a", ()), compare.Arm("b", (override,))]
    with pytest.raises(ValueError, match=rf"arms a and b cannot start from the same weights: .*e\.g\. {unlike}"):
        compare._check_arms(arms, list(TINY))


def test_an_arm_that_would_run_as_the_baseline_is_refused() -> None:
    pytest.importorskip("triton")
    arms = [compare.Arm.parse(text) for text in ("bf16", "mxfp8_g128")]
    with dispatch.asked_of((9, 0)), pytest.raises(ValueError, match=r"arm mxfp8_g128: no layer of this model gains"):
        compare._check_arms(arms, list(TINY))
    named = compare.Arm.parse("mxfp8_g128:precision=mxfp8_g128,precision.quantize=[arch.*]")
    with dispatch.asked_of((9, 0)):
        compare._check_arms([arms[0], named], list(TINY))


def test_arms_need_a_test_split(tmp_path: Path) -> None:
    data = ["data=movielens", "data.split=[0.9,0.1,0]", f"data.cache_dir='{tmp_path}'"]
    with pytest.raises(ValueError, match="compared on the test split, which is empty"):
        compare._check_arms([compare.Arm("a", ())], data)


class Cyclic:
    """Refers to itself, as a model with its hooks and graphs does."""

    alive: ClassVar[weakref.WeakSet[Cyclic]] = weakref.WeakSet()

    def __init__(self, *_: object) -> None:
        assert not self.alive
        self.alive.add(self)
        self.run = partial(Cyclic.nothing, self)

    def nothing(self) -> None: ...


def test_an_arm_does_not_train_beside_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "Trainer", Cyclic)
    (tmp_path / "seed-0" / "initial").mkdir(parents=True)
    (tmp_path / "seed-0" / "initial" / "meta.json").touch()
    arms = [compare.Arm(name, ()) for name in ("a", "b")]
    gc.disable()
    try:
        compare._train_arms(arms, arms[0], 0, list(TINY), tmp_path, cast(Any, None))
    finally:
        gc.enable()
    assert not Cyclic.alive


ASSERT_EQUAL = (*TINY_DLRM, "runtime.steps=3", "--assert-equal", "--seeds", "0", "--arms", "a:runtime.log_every=1")


def test_assert_equal_is_a_refactoring_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*ASSERT_EQUAL, "b:runtime.log_every=1", "--out", str(tmp_path / "equal"), "runtime.device=cpu"]
    assert compare.main(arguments) == 0
    assert "are equal" in capsys.readouterr().out

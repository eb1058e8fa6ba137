"""The training command as users type it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.batch import RequestBatch
from tests.launching import ROOT, TINY, TINY_DLRM, python, run, train, train_here, train_ranks
from tests.train.config.test_experiments import composed
from train import main
from train.config.schema import SyntheticConfig
from train.record.tracking import read_metrics
from train.trainer import Trainer


def test_the_file_runs_from_any_directory(tmp_path: Path) -> None:
    command = [str(ROOT / "train" / "main.py"), *TINY_DLRM, "runtime.run_dir=by_file", "runtime.steps=2"]
    run(python(*command), cwd=tmp_path)
    train_here(tmp_path / "here", "runtime.steps=2", base=TINY_DLRM)
    losses = [
        [record.values["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if record.split == "train"]
        for name in ("by_file", "here")
    ]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    options = ("runtime.steps=4", "runtime.log_every=20", "data.num_workers=1", "tracking.wandb=offline")
    command = train(2, tmp_path / "run", *options, "tracking.tensorboard=true")
    done = run([*command, "runtime.eval_every=2"], cwd=tmp_path)
    printed = [line for line in (done.stdout + done.stderr).splitlines() if " WARNING " not in line]
    assert len(printed) <= 30, "\n".join(printed)  # there were 150
    assert not [line for line in printed if line.startswith(("wandb:", "W1", "<frozen"))]
    details = (tmp_path / "run" / "train.log").read_text()
    assert "arch.heads.trunks" in details  # of the layers
    assert "shard offsets" in details
    steps = [record.step for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record.split == "train"]
    assert steps == [1, 2, 3, 4]  # a curve, also of a short run
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["step"] == 4
    assert 0 <= results["test"]["click/auc"] <= 1
    assert results["test"]["click/ne"] > 0
    assert results["examples_per_s"] > 0
    last = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record.split == "train"][-1]
    assert 2**20 < last.values["peak_memory_bytes"] <= results["peak_memory_bytes"]
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["config"]["model"]["dim"] == 16
    assert "torch" in about["versions"]
    for name in ("plots/training.png", "plots/calibration.png", "plots/scores.png", "metrics.jsonl", "train.log"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert len(list((tmp_path / "run" / "predictions" / "test").glob("*.parquet"))) == 2
    assert list((tmp_path / "run" / "checkpoints").glob("step_*/meta.json"))


def test_experiments_overlay(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "short.yaml").write_text("# @package _global_\nruntime: {steps: 1}\n")
    overlaid = ["+experiment=[synthetic,short]", *TINY[1:], f"hydra.searchpath=[file://{tmp_path}/conf]"]
    train_here(tmp_path / "run", base=overlaid)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 1


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer.learning_rate=1", "learning_rate"),
        ("model.num_head=2", "num_head"),
        ("+optimizer.learning_rate=1", "optimizer.learning_rate is no key of the configuration; there are .* lr,"),
        ("+model.moe.num_expert=2", r"did you mean model\.moe\.num_experts\?"),
        ("optimizer.lr=fast", "lr"),
        ("model.num_heads=3", "model.num_heads"),
        ("optimizer.sparse=lion", "rowwise_adagrad"),
        ("precision=mxfp4", "mxfp8"),
        ("tracking.progress=yes", "never"),
    ],
)
def test_a_wrong_key_or_value_is_named(override: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=named):
        train_here(tmp_path / "run", override)


def test_hydra_s_multirun_is_refused_with_the_sweep() -> None:
    """Under torchrun its second job waited for process groups of the first for ever."""
    with pytest.raises(ValueError, match=r"python -m launch\.sweep \+experiment=NAME --over runtime\.seed=0,1"):
        main.main(["-m", *TINY_DLRM, "runtime.seed=0,1"])


def test_a_misspelt_key_in_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "typo.yaml").write_text("# @package _global_\noptimizer: {warmup: 3}\n")
    with pytest.raises(ValueError, match=r"optimizer.warmup is no key .*; did you mean optimizer.warmup_steps\?"):
        train_here(tmp_path / "run", base=["+experiment=typo", f"hydra.searchpath=[file://{tmp_path}/conf]"])


def test_validation_in_mid_epoch_early_stop_and_profile(tmp_path: Path) -> None:
    # Nothing is learnt at this rate, so the second validation is no better than the first.
    options = (
        "runtime.eval_every=3",
        "runtime.early_stop=1",
        "runtime.profile_step=1",
        "runtime.log_every=4",
        "runtime.epochs=9",
        "runtime.deterministic=true",
        "optimizer.lr=1e-30",
        "optimizer.sparse_lr=0",
    )
    try:
        train_here(tmp_path / "run", *options, base=TINY_DLRM)
    finally:
        torch.use_deterministic_algorithms(False)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["step"], results["best_step"]) == (6, 3)
    assert re.match(r"stopped early at step 6 of \d+: the last validation was not better than", results["ended"])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in records if record.split == "train"] == [4, 6]  # the stop is no multiple of four
    assert (tmp_path / "run" / "profile" / "trace.json").stat().st_size > 0


@pytest.mark.reliability(
    "a batch with a non-finite loss",
    "skipped and counted, or the run stops, by `runtime.bad_batch`",
)
def test_a_bad_batch_is_skipped_and_counted_or_stops_the_run(tmp_path: Path) -> None:
    explode = ("optimizer.lr=1e38", "optimizer.warmup_steps=0", "optimizer.clip_norm=0", "precision=fp32")
    for steps in (3, 5):  # the second goes on where the first ended
        skip = ("runtime.skip_window=0", f"runtime.steps={steps}")
        train_here(tmp_path / "skipping", *explode, *skip, base=TINY_DLRM)
        results = json.loads((tmp_path / "skipping" / "results.json").read_text())
        assert results["skipped_steps"] == steps - 1  # all but the one that blew the weights up
    with pytest.raises(RuntimeError, match="non-finite loss or gradient"):
        train_here(tmp_path / "run", *explode, "runtime.bad_batch=stop", "checkpoint.every=1", base=TINY_DLRM)
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").exists()  # was being written when the run was stopped


@pytest.mark.parametrize(("window", "ended"), [(4, 6), (20, 20)])
@pytest.mark.reliability(
    "batch after batch with a non-finite loss",
    "an error once most of `runtime.skip_window` batches were skipped; the last good checkpoint stays",
)
def test_a_run_that_diverges_stops_and_keeps_the_checkpoint_from_before(
    window: int, ended: int, tmp_path: Path
) -> None:
    class Diverging(Trainer):
        def _forward(self, batch: RequestBatch) -> tuple[Tensor, tuple[Tensor, Tensor, RequestBatch]]:
            loss, rest = super()._forward(batch)
            return loss * (torch.nan if self.progress.step >= 3 else 1), rest

    options = (f"runtime.skip_window={window}", "checkpoint.every=1", "checkpoint.keep=1", "runtime.steps=30")
    with pytest.raises(
        RuntimeError, match=rf"has diverged: \d+ of the {window} batches .*; step 3 is saved. Try"
    ) as told:
        train_here(tmp_path, *options, base=TINY_DLRM, trainer=Diverging)
    assert f"up to step {ended} " in str(told.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]
    assert not (tmp_path / "results.json").exists()


def test_a_run_whose_best_validation_had_no_gauc_resumes(tmp_path: Path) -> None:
    for _ in range(2):
        train_here(tmp_path / "run", "data.batch_size=1", "runtime.eval_steps=1", "runtime.steps=2", base=TINY_DLRM)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["valid"]["click/gauc"] is None


def test_a_run_too_short_for_its_schedule_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.accumulate=4 is more than the 3 steps"):
        train_here(tmp_path / "run", "optimizer.accumulate=4", "runtime.steps=3", base=TINY_DLRM)
    train_here(tmp_path / "rising", "optimizer.warmup_steps=3", "runtime.steps=2", base=TINY_DLRM)
    assert "to reach it, lower optimizer.warmup_steps=3" in (tmp_path / "rising" / "train.log").read_text()


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    few = ("data.num_requests=1", "runtime.epochs=2", "data.batch_size=4")
    train_ranks(2, tmp_path / "run", *few, base=TINY_DLRM)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, which experiments share."""
    return tmp_path_factory.mktemp("cache")


def experiments() -> list[Any]:
    """Those whose data is made up or ships with the repository, but for other sizes of one that is here, too.

    `make nightly` has those of models that another one has, too, and most of token mixing, which is one class.
    """
    names = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml"))
    others = re.compile(r"ml1m|gowalla|amazon|sessions|.*(_large|_ratio64)$")
    often = ["gem_long_h200", *(f"movielens_{name}" for name in ("gem", "kunlun", "wukong", "tokenmixer"))]
    often += ["movielens_rankmixer", "movielens_mixformer"]
    again = dict.fromkeys(often, pytest.mark.nightly)
    return [pytest.param(name, marks=again.get(name, ())) for name in names if not others.match(name)]


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_takes_two_steps(experiment: str, tmp_path: Path, cache: Path) -> None:
    small = ["data.batch_size=8", "data.num_workers=0", "runtime.steps=2", "runtime.eval_steps=1", "runtime.threads=1"]
    small += ["data.eval_batch_size=1024", "data.split=[0.9,0.09,0.01]"]  # the test split is evaluated as a whole
    if isinstance(composed(experiment).data, SyntheticConfig):
        small += ["data.num_users=100", "data.num_items=400", "data.max_history=8", "data.num_requests=100"]
        small += ["data.eval_requests=20", "data.pad_events=64", "data.candidates=2"]
    if re.search(r"production|long|(gem|kunlun|wukong)_h200", experiment):
        small += ["model.dim=32"]  # a step of the width for GPUs takes seconds, and so does one of many features
        small += ["data.num_request_features=8", "data.num_candidate_features=8"]
    if re.search(r"(gem|interformer_production|kunlun|wukong)_h200", experiment):
        small += ["model.num_layers=2"]
    if experiment == "production_mxfp8_h200":
        small += ["model.moe.expert_dim=64", "model.wukong.num_lcb=16", "model.pffn_hidden=32"]
    if experiment == "tokenmixer_h200":
        small += ["model.token_dim=32", "model.head_hidden=[16]"]
    off = ["tracking.wandb=disabled", f"data.cache_dir='{cache}'"]
    train_here(tmp_path / "run", base=[f"+experiment={experiment}", *small, *off, "runtime.log_every=1"])
    assert json.loads((tmp_path / "run" / "results.json").read_text())["step"] == 2
    trained = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record.split == "train"]
    # Routers that have just been initialised are not in perfect balance; models without any report nothing.
    routed = "moe" in experiment or "mxfp8" in experiment
    assert all((record.values.get("load_violation", 0) > 0) == routed for record in trained)

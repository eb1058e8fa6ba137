"""What a configuration leaves open about the length of a run is chosen by the size of its data."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launching import train_here
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.data.statistics import compute
from train.process import length


def config_of(*overrides: str) -> Config:
    return to_config(composed(overrides))


@lru_cache
def plain() -> Config:
    return config_of("data=movielens_ids")


def settled(requests: int, *overrides: str, validated: bool = True, ranks: int = 1) -> tuple[Any, ...]:
    """Batch size, epochs, validations an epoch, early stop and warm-up."""
    config = copy.deepcopy(plain())
    for override in overrides:
        key, value = override.split("=")
        length._set(config, key, int(value))
    length.settle(config, requests, validated, ranks)
    runtime = config.runtime
    chosen = runtime.epochs, runtime.evals_per_epoch, runtime.early_stop
    return config.data.batch_size, *chosen, config.optimizer.warmup_steps


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        (7_000, (32, 2, 2, 0, 20)),  # 28 steps of one epoch in batches of 256
        (24_000, (64, 2, 2, 0, 20)),
        (300_000, (256, 2, 2, 0, 20)),
        (600_000, (256, 2, 2, 0, 20)),
        (50_000_000, (256, 1, 4, 0, 20)),
        (1, (32, 10, 2, 4, 1)),
        (100, (32, 10, 2, 4, 4)),
    ],
)
def test_less_data_takes_smaller_batches_and_more_epochs(requests: int, expected: tuple[int, ...]) -> None:
    assert settled(requests) == expected


def test_few_requests_are_learned_with_less_memory_by_models_that_leave_it_open() -> None:
    def rates(requests: int, model: str, dropout: float | None, *overrides: str) -> dict[str, Any]:
        config = config_of("data=movielens_ids", f"model={model}", *overrides)
        config.model.dropout = dropout or config.model.dropout
        length.settle(config, requests, validated=True, uncounted=compute.uncounted(config.data))
        return {key: found for key in length.OF_FEW if (found := length._get(config, key)) is not None}

    fixed = {key: length.FIXED[key] for key in length.OF_FEW}
    assert rates(24_000, "interformer", None) == length.OF_FEW
    assert rates(24_000, "interformer", 0.1) == length.OF_FEW | {"model.dropout": 0.1}
    assert rates(300_000, "interformer", None) == fixed
    uncounted = length.OF_FEW | {"optimizer.sparse_lr": fixed["optimizer.sparse_lr"]}
    numbers = "data.candidate_numeric=[rating]"
    assert rates(24_000, "interformer", None, numbers) == uncounted
    assert rates(24_000, "interformer", None, numbers, "data.statistics=auto") == length.OF_FEW
    by_user = "data.split_by=last"  # by which there are no statistics
    assert rates(24_000, "interformer", None, numbers, "data.statistics=auto", by_user) == uncounted
    assert rates(24_000, "interformer", None, numbers, "model.plain_head=false") == length.OF_FEW | {
        "model.plain_head": False
    }
    del fixed["model.plain_head"]
    assert rates(24_000, "din", 0.1) == fixed | {"model.dropout": 0.1}
    assert rates(24_000, "kunlun", None) == rates(24_000, "gem", None) == length.OF_FEW
    assert rates(24_000, "wukong", None) == fixed


def test_graphs_do_without_further_heads() -> None:
    config = config_of("data=movielens_ids", "runtime.cuda_graphs=true")
    length.settle(config, 24_000, validated=True)
    assert config.model.plain_head is False  # type: ignore[attr-defined]
    config.model.plain_head = True  # type: ignore[attr-defined] # as a run that is resumed had it
    with pytest.raises(ValueError, match="runtime.cuda_graphs=true with model.plain_head=true: .* use runtime.cuda_gr"):
        length.settle(config, 24_000, validated=True)


def test_what_is_given_stays_and_the_rest_follows_it() -> None:
    assert settled(24_000, "data.batch_size=100", "optimizer.warmup_steps=7") == (100, 2, 2, 0, 7)
    assert settled(24_000, "runtime.epochs=3") == (64, 3, 1, 0, 20)  # who says how long gets that, whole
    assert settled(24_000, "runtime.steps=50") == (64, 1, 1, 0, 5)
    assert settled(24_000, "runtime.eval_every=9") == (64, 2, 1, 0, 20)
    assert settled(24_000, "runtime.early_stop=1", "runtime.evals_per_epoch=5")[2:4] == (5, 1)
    assert settled(24_000, validated=False)[1:4] == (2, 1, 0)
    assert settled(24_000, ranks=4)[0] == 32
    assert settled(60_000, "parallel.balance=12")[0] == 120
    assert settled(24_000, "optimizer.accumulate=200")[4] == 1


@pytest.mark.parametrize("experiment", ["quickstart", "synthetic_moe", "ml1m_quality", "ml1m_sasrec"])
def test_experiments_are_as_they_were(experiment: str) -> None:
    config = config_of(f"+experiment={experiment}")
    length.settle(config, 1_000_000, True, 1)
    found = {key: length._get(config, key, False) for key in length.KEYS}
    of_experiment = {
        "synthetic_moe": {"data.batch_size": 512, "optimizer.warmup_steps": 200, "optimizer.lr": 5e-4},
        "ml1m_quality": {"data.batch_size": 2048, "runtime.epochs": 2, "runtime.evals_per_epoch": 4},
        "ml1m_sasrec": {
            "data.batch_size": 128,
            "runtime.epochs": 65,
            "optimizer.warmup_steps": 100,
            "optimizer.lr": 2e-3,
            "optimizer.sparse_lr": 2e-3,
            "model.dropout": 0.3,
        },
    }
    assert found == length.FIXED | of_experiment.get(experiment, {})


def test_a_plain_description_of_few_rows_trains_enough(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lines = ["user,time,item,click"]
    for row in range(1500):
        user, item = generator.integers(10), generator.integers(20)
        lines.append(f"u{user},{100 * row},i{item},{int((user + item) % 2 == 0)}")
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    (tmp_path / "conf" / "data" / "mine.yaml").write_text(
        "defaults: [events_schema, _self_]\nfiles: [rows.csv]\nuser: user\ntime: time\nlabels: {click: click}\n"
        "request_categorical: [user]\ncandidate_categorical: [item]\n"
    )

    def auc(name: str, *overrides: str) -> float:
        base = [
            f"hydra.searchpath=[file://{tmp_path}/conf]", "data=mine", f"data.root='{tmp_path}'", "model=dcnv2",
            f"data.cache_dir='{tmp_path}/cache'", "data.num_workers=0", "tracking.wandb=disabled",
            "tracking.tensorboard=false", "runtime.threads=1", "precision=fp32",
        ]  # fmt: skip
        train_here(tmp_path / name, *overrides, base=base)
        return json.loads((tmp_path / name / "results.json").read_text())["test"]["click/auc"]

    before = ("data.batch_size=256", "runtime.epochs=1", "optimizer.warmup_steps=20")
    once = auc("once", *before)
    assert auc("open") > max(0.95, once + 0.1)
    saved = json.loads((tmp_path / "open" / "config.json").read_text())["config"]
    assert (saved["data"]["batch_size"], saved["runtime"]["epochs"], saved["runtime"]["early_stop"]) == (32, 7, 4)
    log = (tmp_path / "open" / "train.log").read_text()
    assert "1,200 training requests: data.batch_size=32 runtime.epochs=7" in log
    # Another start of the run has what it began with, whatever the data says by then.
    config = copy.deepcopy(plain())
    world: Any = type("World", (), {"by_first": lambda self, make: make()})()
    length.restore(config, world, tmp_path / "once")
    assert (config.data.batch_size, config.runtime.epochs) == (256, 1)


@pytest.mark.parametrize(("saved", "expected"), [({"plain_head": True}, True), ({}, False), (None, None)])
def test_a_run_has_the_parts_of_the_weights_with_which_it_begins(tmp_path: Path, saved: Any, expected: Any) -> None:
    world: Any = type("World", (), {"by_first": lambda self, make: make()})()
    if saved is not None:
        (tmp_path / "meta.json").write_text(json.dumps({"config": {"model": saved}}))
    for place in ("load", "run_dir"):
        config = copy.deepcopy(plain())
        config.checkpoint.load = str(tmp_path) if place == "load" else None
        length.restore(config, world, tmp_path if place == "run_dir" else tmp_path / "none")
        assert config.model.plain_head is expected  # None: by the size of the data

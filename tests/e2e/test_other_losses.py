"""A run whose tasks are a real number, a class and an order within requests: metrics, best checkpoint, predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.metrics.predictions import read_predictions
from train.process import distributed
from train.trainer import Trainer


def config(folder: Path, *changes: str) -> Config:
    generator = np.random.default_rng(0)
    item, user = generator.integers(8, size=600), generator.integers(40, size=600)
    table = {
        "user": user,
        "item": item,
        "time": np.arange(600) // 3 * 100,  # of which some are of one user: a request
        "stars": item % 4 + generator.normal(0, 0.1, 600),
        "kind": item % 3,
        "grade": item // 2,
    }
    table["user"] = np.repeat(user[::3], 3)
    pq.write_table(pa.table(table), folder / "events.parquet")
    overrides = [
        "data=events", f"data.root={folder}", f"data.cache_dir={folder}/cache", "data.files=[events.parquet]",
        "data.user=user", "data.time=time", "+data.labels={stars: stars, kind: kind, order: grade}",
        "data.real_labels=[stars, kind, order]", "data.candidate_categorical=[item]", "data.batch_size=32",
        "data.num_workers=0", "model=dcnv2", "model.dim=8", "model.hidden=[16]", "precision=fp32",
        "+tasks.stars.loss=huber", "+tasks.stars.delta=2", "+tasks.kind={loss: classes, number: 3}",
        "+tasks.order.loss=pairwise", "optimizer.lr=0.02", "optimizer.sparse_lr=0.2", "runtime.epochs=8",
        "runtime.eval_epochs=4", "runtime.device=cpu", "runtime.threads=1", f"runtime.run_dir={folder}/run",
        "tracking.wandb=disabled", "tracking.tensorboard=false", *changes,
    ]  # fmt: skip
    return to_config(composed(overrides))


def test_each_task_is_trained_judged_and_predicted_in_its_own_way(tmp_path: Path) -> None:
    settings = config(tmp_path)
    world = distributed.start(settings.runtime)
    try:
        Trainer(settings, world).run()
    finally:
        distributed.stop()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    test = results["test"]
    assert test["stars/nmse"] < 0.5
    assert test["kind/accuracy"] > 0.8
    assert test["order/pair_accuracy"] > 0.8
    assert results["best_step"] > 0
    assert {"stars/rmse", "kind/ne", "order/ranked_requests"} <= results["valid"].keys()
    written = read_predictions(tmp_path / "run" / "predictions" / "test")
    error = written["stars_prediction"] - written["stars_label"]
    assert np.sqrt((error**2).mean()) == pytest.approx(test["stars/rmse"], rel=1e-4)
    shares = np.stack([written[f"kind_probability_{number}"] for number in range(3)], 1)
    assert shares.sum(1) == pytest.approx(np.ones(len(shares)), abs=1e-5)
    assert (shares.argmax(1) == written["kind_label"]).mean() == pytest.approx(test["kind/accuracy"])
    assert "order_prediction" in written
    validations = [
        record
        for record in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if record.get("split") == "valid"
    ]
    assert len(validations) == 2


def test_labels_that_a_loss_does_not_take_end_the_run_at_its_start(tmp_path: Path) -> None:
    settings = config(tmp_path, "~tasks.kind", "~tasks.stars")
    world = distributed.start(settings.runtime)
    try:
        with pytest.raises(ValueError, match=r"task stars has labels of -0.\d+ to 3.\d+, and its loss takes numbers"):
            Trainer(settings, world)
    finally:
        distributed.stop()

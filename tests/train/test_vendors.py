"""A run on rows with vendors learns what only their features tell."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from train.commands.table import fit


def test_a_run_learns_from_features_of_vendors(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    size = 1200
    shop = generator.integers(6, size=size)
    rows = {
        "user": generator.integers(20, size=size),
        "item": generator.integers(30, size=size),
        "time": np.arange(size) * 100,
        "shop": shop,
        "rating": np.array([0.1, 0.4, 0.2, 0.9, 0.3, 0.5])[shop],
        "click": shop % 2,
    }
    with mock.patch("train.record.plots.plot_run"):
        results = fit(
            pa.table(rows),
            "model=dcnv2",
            "model.dim=8",
            "optimizer.warmup_steps=2",
            "optimizer.lr=0.01",
            "optimizer.sparse_lr=0.1",
            "runtime.epochs=4",
            "runtime.device=cpu",
            "tracking.wandb=disabled",
            "tracking.tensorboard=false",
            "data.batch_size=16",
            "data.num_workers=0",
            f"data.cache_dir={tmp_path / 'cache'}",
            run_dir=str(tmp_path / "run"),
            user="user",
            time="time",
            request_window=20_000,
            labels={"click": "click"},
            request_categorical=["user"],
            candidate_categorical=["item"],
            vendor="shop",
            vendor_categorical=["shop"],
            vendor_numeric=["rating"],
        )
    assert results["test"]["click/auc"] > 0.9

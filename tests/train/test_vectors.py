"""A run learns what only a column of vectors tells."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from train.commands.table import fit

SIZE = 1000


def auc_of(tmp_path: Path, name: str, **columns: object) -> float:
    generator = np.random.default_rng(0)
    image = generator.normal(size=(SIZE, 6)).astype(np.float32)
    rows = {
        "user": generator.integers(20, size=SIZE),
        "item": np.arange(SIZE),  # seen once: only the image tells what it is
        "time": np.arange(SIZE) * 100,
        "image": pa.FixedSizeListArray.from_arrays(image.ravel(), 6),
        "click": (image @ generator.normal(size=6) > 0).astype(np.int64),
    }
    with mock.patch("train.record.plots.plot_run"):
        results = fit(
            pa.table(rows),
            "model=dcnv2",
            "model.dim=8",
            "optimizer.warmup_steps=2",
            "optimizer.lr=0.01",
            "runtime.epochs=2",
            "runtime.device=cpu",
            "tracking.wandb=disabled",
            "tracking.tensorboard=false",
            "data.batch_size=16",
            "data.num_workers=0",
            f"data.cache_dir={tmp_path / 'cache'}",
            run_dir=str(tmp_path / name),
            user="user",
            time="time",
            labels={"click": "click"},
            request_categorical=["user"],
            candidate_categorical=["item"],
            **columns,
        )
    return results["test"]["click/auc"]


def test_vectors_lift_auc_where_they_carry_the_signal(tmp_path: Path) -> None:
    assert auc_of(tmp_path, "with", candidate_vectors={"image": {"width": 6}}) > 0.9
    assert auc_of(tmp_path, "without") < 0.65

"""Vectors by id lift AUC on ids that were never trained, on one rank and on two; they stay, resume and are exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.distributed.checkpoint.test_incremental import saved
from tests.distributed.checkpoint.test_resume import training
from tests.launching import EVENTS_DLRM, train_here, train_ranks
from train import evaluate
from train.checkpoint.load import read_meta
from train.commands import export
from train.commands.fit import fit
from train.config.compose import from_dict
from train.data import build_source
from train.data.source import PreparedSource
from train.metrics.predictions import read_predictions
from train.serving.service import Service

ITEMS, WIDTH = 300, 6
BASE = (
    *EVENTS_DLRM,
    "runtime.epochs=4",
    "optimizer.lr=0.02",
    "runtime.eval_steps=0",
)
VECTORS = (
    "data.candidate_categorical=[item,content]",
    "+data.transforms={content: {copy: item}}",
    f"+data.table_vectors={{content: {{files: [vectors.parquet], id: id, vector: v, width: {WIDTH}, dtype: fp16}}}}",
)


def write(folder: Path) -> tuple[str, ...]:
    """Rows whose label is that of their item's vector; each item comes four times, one after the other."""
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(ITEMS, WIDTH)).astype(np.float32)
    item = np.repeat(np.arange(ITEMS), 4)
    rows = {
        "user": generator.integers(20, size=len(item)),
        "item": item,
        "time": np.arange(len(item)) * 100,
        "click": (vectors @ generator.normal(size=WIDTH) > 0).astype(np.int64)[item],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    pq.write_table(pa.table({"id": np.arange(ITEMS), "v": vectors.tolist()}), folder / "vectors.parquet")
    # Statistics of an item's earlier rows would tell its label, too.
    none = "data.statistics=none"
    return f"data.root='{folder}'", "data.files=[rows.parquet]", f"data.cache_dir='{folder}/cache'", none


def auc(run_dir: Path) -> float:
    return json.loads((run_dir / "results.json").read_text())["test"]["click/auc"]


def test_vectors_of_ids_that_were_never_trained(tmp_path: Path) -> None:
    files = write(tmp_path)
    alone, both, resumed, without = (tmp_path / name for name in ("alone", "both", "resumed", "without"))
    train_here(without, *files, "data.batch_size=64", base=BASE)
    assert auc(without) < 0.65
    train_here(alone, *files, *VECTORS, "data.batch_size=64", base=BASE)
    assert auc(alone) > 0.9
    sharded = (*files, *VECTORS, "data.batch_size=32", "parallel.sharding_types=[row_wise]", "checkpoint.keep=9")
    train_ranks(2, both, *sharded, base=BASE)
    assert auc(both) > 0.9
    steps = sorted((both / "checkpoints").iterdir())
    shutil.copytree(steps[0], resumed / "checkpoints" / steps[0].name)
    train_here(resumed, *files, *VECTORS, "data.batch_size=64", base=BASE)
    losses = [record.values["loss"] for record in training(both)]
    again = [record.values["loss"] for record in training(resumed)]
    assert again == pytest.approx(losses[-len(again) :], rel=1e-4)

    config = from_dict(read_meta(steps[-1])["config"], [])
    source = build_source(config.data)
    assert isinstance(source, PreparedSource)
    rows = torch.from_numpy(source.vectors("content"))
    for run_dir in (alone, both, resumed):
        tensors = saved(run_dir)
        (name,) = (name for name in tensors if name.endswith(".content.weight") and ".embeddings." in name)
        assert torch.equal(tensors[name].half(), rows)
        assert not [name for name in tensors if "content" in name and name.startswith("tables.")]  # no moments

    parts = fit(config, ranks=1, node_ranks=1, gpu_gib=1).parts
    assert parts["vectors from files"] == rows.numel() * 2
    learned = {name: size for name, size in source.spec.tables.items() if name != "content"}
    assert parts["tables"] == 2 * parts["optimiser of tables"] * 4 == sum(learned.values()) * 8 * 4

    out = tmp_path / "predictions"
    evaluate.main([f"run_dir={both}", f"out={out}", "runtime.device=cpu", "runtime.threads=1"])
    predicted = read_predictions(out / "predictions")
    folder = export.main([f"run_dir={both}", f"out={tmp_path}/export", "runtime.device=cpu", "compile=false"])
    table, service = pq.read_table(tmp_path / "rows.parquet").to_pylist(), Service.from_pretrained(folder)
    for row, probability in list(zip(predicted["row"], predicted["click_probability"], strict=True))[::12]:
        (scores,) = service([{"request": table[row], "candidates": [table[row]], "time": table[row]["time"]}])
        assert scores["click"][0] == pytest.approx(probability, abs=1e-5)

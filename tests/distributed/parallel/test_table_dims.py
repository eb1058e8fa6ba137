"""Tables of several widths train, resume and are evaluated and exported, on one rank and sharded over two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.checkpoint.test_incremental import saved
from tests.distributed.checkpoint.test_resume import training
from tests.launching import TINY_DLRM, train_here, train_ranks
from train import evaluate
from train.commands import export, score

MIXED = (*TINY_DLRM, "+model.table_dims={item: 8, user: 32, category: 8}", "runtime.steps=6", "precision=fp32")


def steps(ranks: int) -> tuple[str, ...]:
    return ("checkpoint.every=3", "checkpoint.keep=5", f"data.batch_size={32 // ranks}")


@pytest.mark.parametrize("sharding", ["row_wise", pytest.param("table_wise", marks=pytest.mark.nightly)])
def test_two_ranks_learn_what_one_does_and_resume(sharding: str, tmp_path: Path) -> None:
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    kind = f"parallel.sharding_types=[{sharding}]"
    train_ranks(2, whole, kind, *steps(2), "runtime.eval_every=2", base=MIXED)
    for folder, ranks in ((resumed, 2), (alone, 1)):
        shutil.copytree(whole / "checkpoints" / "step_00000003", folder / "checkpoints" / "step_00000003")
        train_ranks(ranks, folder, kind, *steps(ranks), "runtime.eval_every=2", base=MIXED)
    losses = [record.values["loss"] for record in training(whole)]
    assert [record.values["loss"] for record in training(resumed)] == losses[3:]
    assert [record.values["loss"] for record in training(alone)] == pytest.approx(losses[3:], rel=1e-5)


def test_they_are_evaluated_exported_and_frozen(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train_here(run_dir, base=MIXED)
    results = json.loads((run_dir / "results.json").read_text())["test"]
    values = evaluate.main([f"run_dir={run_dir}", f"out={tmp_path}/test", "runtime.device=cpu", "runtime.threads=1"])
    assert values == pytest.approx(results, nan_ok=True)
    out = export.main([f"run_dir={run_dir}", f"out={tmp_path}/out", "runtime.device=cpu", "compile=false"])
    batch = export.build_source(export.from_dict(json.loads((run_dir / "config.json").read_text())["config"], []).data)
    assert score.Scorer(out)(batch.batch("test", np.array([0]))).isfinite().all()
    load = (f"checkpoint.load='{run_dir}'", "optimizer.frozen=['*.embeddings.item']")
    train_here(tmp_path / "tuned", *load, base=MIXED)
    before, after = saved(run_dir), saved(tmp_path / "tuned")
    name = "model.embedding.further.8.embeddings.{}.weight"
    assert (before[name.format("item")] == after[name.format("item")]).all()
    assert (before[name.format("category")] != after[name.format("category")]).any()

"""`optimizer.ema_decay`: training does not see it, evaluations, resumption, export and `train.evaluate` do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.checkpoint.test_incremental import saved
from tests.distributed.checkpoint.test_resume import training
from tests.launching import TINY_DLRM, train_here, train_ranks
from train import evaluate
from train.commands import export
from train.record.tracking import Record, read_metrics

DECAY = 0.5
RUN = (*TINY_DLRM, "runtime.steps=6", "runtime.eval_every=3", "checkpoint.keep=9", "optimizer.warmup_steps=0")
AVERAGED = (*RUN, f"optimizer.ema_decay={DECAY}")


def evaluations(run_dir: Path) -> list[Record]:
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if record.split != "train"]


@pytest.mark.parametrize(("ranks", "precision"), [pytest.param(1, "mxfp8", marks=pytest.mark.nightly), (2, "bf16")])
def test_evaluations_see_the_average_and_a_resumed_run_the_same_one(ranks: int, precision: str, tmp_path: Path) -> None:
    plain, whole, resumed = (tmp_path / name for name in ("plain", "whole", "resumed"))
    wide = (f"precision={precision}", "model.dim=32")
    train_ranks(ranks, plain, *wide, base=RUN)
    train_ranks(ranks, whole, *wide, base=AVERAGED)
    assert [r.values["loss"] for r in training(plain)] == [r.values["loss"] for r in training(whole)]
    assert all(a.values != b.values for a, b in zip(evaluations(plain), evaluations(whole), strict=True))
    shutil.copytree(whole / "checkpoints" / "step_00000003", resumed / "checkpoints" / "step_00000003")
    train_ranks(ranks, resumed, *wide, base=AVERAGED)
    assert [r.values for r in evaluations(resumed)] == [r.values for r in evaluations(whole)][1:]
    with pytest.raises(ValueError, match=r"optimizer\.ema_decay=0\.5, this run has 0\.0; resume with the same value"):
        train_here(resumed, *wide, base=RUN)


def test_a_checkpoint_is_evaluated_and_exported_by_its_average(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train_here(run_dir, "precision=fp32", base=AVERAGED)
    results = json.loads((run_dir / "results.json").read_text())["test"]
    values = evaluate.main([f"run_dir={run_dir}", f"out={tmp_path}/test", "runtime.device=cpu", "runtime.threads=1"])
    assert values == pytest.approx(results, nan_ok=True)
    tensors = saved(run_dir)
    export.main([f"run_dir={run_dir}", f"out={tmp_path}/out", "runtime.device=cpu", "compile=false"])
    exported = load_file(tmp_path / "out" / "model.safetensors")
    name = "embedding.assemble.request_dense.weight"
    assert torch.equal(exported[name], tensors[f"dense.{name}.average"])
    assert not torch.equal(exported[name], tensors[f"model.{name}"])
    table = "embedding.collection.embeddings.item.weight"
    assert torch.equal(exported[table], tensors[f"model.{table}"])


def test_a_new_run_starts_from_the_weights_that_were_trained(tmp_path: Path) -> None:
    train_here(tmp_path / "first", base=AVERAGED)
    load = (f"checkpoint.load='{tmp_path}/first'", "checkpoint.load_what=optimizer", "optimizer.lr=0")
    train_here(tmp_path / "plain", *load, "optimizer.weight_decay=0", base=RUN)
    train_here(tmp_path / "averaged", *load, "optimizer.weight_decay=0", base=AVERAGED)
    first, plain, averaged = (saved(tmp_path / name) for name in ("first", "plain", "averaged"))
    name = "arch.heads.first.0.own.weight"
    assert torch.equal(plain[f"model.{name}"], first[f"model.{name}"])
    torch.testing.assert_close(averaged[f"dense.{name}.average"], first[f"model.{name}"], rtol=1e-6, atol=1e-7)
    # The checkpoint of a run without an average has the moments that one with it asks for.
    load = (f"checkpoint.load='{tmp_path}/plain'", *load[1:])
    train_here(tmp_path / "later", *load, base=AVERAGED)

"""Ranks whose layers are compiled, by Inductor, take the steps of those whose are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.launching import TINY_DLRM, train_ranks
from train.record.tracking import read_metrics


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for a CPU needs a C++ compiler")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])  # each of them compiles
def test_compiled_ranks_train_as_others_do(ranks: int, tmp_path: Path) -> None:
    options = ("runtime.steps=3", "precision=fp32")
    train_ranks(ranks, tmp_path / "compiled", *options, "runtime.compile=true", base=TINY_DLRM)
    train_ranks(ranks, tmp_path / "plain", *options, base=TINY_DLRM)
    compiled, plain = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("compiled", "plain"))
    losses = [record.values["loss"] for record in plain if record.split == "train"]
    assert [record.values["loss"] for record in compiled if record.split == "train"] == pytest.approx(losses, rel=1e-5)
    assert (
        "ones: 1 MLP, 1 JaggedFeatureInteraction, 2 DotInteraction, 1 TaskHeads"
        in (tmp_path / "compiled" / "train.log").read_text()
    )
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("compiled", "plain")]
    assert results[0]["test"]["click/ne"] == pytest.approx(results[1]["test"]["click/ne"], rel=1e-4)

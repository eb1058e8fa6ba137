"""`train.commands.ratio` on a batch that a test can afford."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.commands import ratio

TINY = ["model.dim=8", "model.num_layers=1", "model.interaction_hidden=[8]", "model.head_hidden=[8]"]
FEW = ["data.max_history=4", "data.mean_history=2", "data.num_users=20", "data.num_items=20", "data.num_categories=5"]


def test_both_arms_are_timed_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio, "ROUNDS", 1)
    rows = ratio.main([f"out={tmp_path / 'out'}", "candidates=4", "ratios=1,4", *TINY, *FEW])
    assert [(row["ratio"], row["arm"]) for row in rows] == [(r, arm) for r in (1, 4) for arm in ("operators", "copies")]
    assert all(row[phase]["ms"] > 0 for row in rows for phase in ("forward", "step"))
    assert json.loads((tmp_path / "out/ratio.json").read_text())["rows"] == rows
    assert (tmp_path / "out/ratio.png").stat().st_size > 0


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match="e.g. out=ratio"):
        ratio.main([])
    with pytest.raises(ValueError, match="'runtime.steps=3' is neither"):
        ratio.main(["runtime.steps=3"])
    with pytest.raises(ValueError, match="must be a multiple of each of"):
        ratio.main(["out=unused", "candidates=4", "ratios=1,8"])

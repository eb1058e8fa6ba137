"""What a run of two ranks publishes is what an export of its last checkpoint holds, after a restart, too."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from modules.pretrained import PretrainedModel
from tests.launching import TINY_DLRM, train_here, train_ranks
from train.checkpoint.publish import Place
from train.commands import export
from train.serving.following import Follower
from train.serving.scorer import Scorer


def test_a_scorer_that_follows_a_run_has_the_weights_of_its_checkpoints(tmp_path: Path) -> None:
    options = ("publish.every=2", "optimizer.ema_decay=0.9", "parallel.sharding_types=[row_wise]", "checkpoint.every=4")
    run_dir = tmp_path / "run"
    train_ranks(2, run_dir, *options, "runtime.steps=4", base=TINY_DLRM)
    folder = export.main([f"run_dir={run_dir}", f"out={tmp_path / 'first'}"])
    place = run_dir / "published"
    assert Place(place).versions() == [1, 2]
    first, second = (json.loads((place / f"0000000{version}.json").read_text()) for version in (1, 2))
    assert len(first["files"]) == len(second["files"]) == 2
    assert (first["step"], second["step"]) == (2, 4)
    scorer = Scorer(folder)
    follower = Follower(scorer, place)
    assert follower.look()
    train_here(run_dir, *options, "runtime.steps=8", "optimizer.schedule=constant", base=TINY_DLRM)
    assert follower.look()
    assert (follower.version, follower.error) == (4, None)
    checkpoint = run_dir / "checkpoints" / "step_00000008"
    again = export.main([f"checkpoint={checkpoint}", f"out={tmp_path / 'again'}"])
    expected = PretrainedModel.from_pretrained(again).state_dict()
    for name, tensors in scorer.weights().items():
        for tensor in tensors:
            assert torch.equal(tensor, expected[name]), name

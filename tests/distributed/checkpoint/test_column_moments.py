"""Moments of row-wise Adagrad go on where a table's columns are split otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.launching import TINY_DLRM, train_ranks
from train.checkpoint.moments import over
from train.checkpoint.read import read_metadata

WIDTH = 64  # two column shards of the narrowest width that the planner makes
OPTIONS = (f"model.dim={WIDTH}", "checkpoint.every=2", "checkpoint.keep=9", "runtime.eval_steps=1")


def test_moments_of_other_columns_are_means_by_the_columns_they_share() -> None:
    gradients = torch.randn(5, 12, dtype=torch.float64)

    def moments(split: tuple[tuple[int, int], ...]) -> Tensor:
        return torch.stack([gradients[:, first : first + count].square().mean(1) for first, count in split])

    thirds, halves, whole = ((0, 4), (4, 4), (8, 4)), ((0, 6), (6, 6)), ((0, 12),)
    torch.testing.assert_close(over(moments(thirds), thirds, 0, 12), moments(whole)[0])  # joined: exact
    torch.testing.assert_close(over(moments(halves), halves, 0, 12), moments(whole)[0])
    torch.testing.assert_close(over(moments(whole), whole, 6, 6), moments(whole)[0])  # split: the same in each part
    first = (4 * moments(thirds)[0] + 2 * moments(thirds)[1]) / 6
    torch.testing.assert_close(over(moments(thirds), thirds, 0, 6), first)


def saved_moments(checkpoint: Path) -> dict[str, Tensor]:
    """[shards, rows] by table."""
    entries = read_metadata(checkpoint).state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in entries.items() if name.endswith(".momentum1")}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    rows = {name: entries["model." + name.removeprefix("tables.state.").rsplit(".", 2)[0]].size[0] for name in state}
    return {name: moments.view(-1, rows[name]) for name, moments in state.items()}


def test_tables_split_by_columns_resume_under_another_plan(tmp_path: Path) -> None:
    run_dir, rows, columns = tmp_path / "run", "[row_wise]", "[column_wise]"
    for steps, kind, ranks in ((2, columns, 2), (4, rows, 2), (6, columns, 2), (8, "[table_wise]", 1)):
        options = (f"parallel.sharding_types={kind}", f"runtime.steps={steps}", f"data.batch_size={32 // ranks}")
        train_ranks(ranks, run_dir, *OPTIONS, *options, base=TINY_DLRM)
    split, joined, again, alone = (saved_moments(run_dir / "checkpoints" / f"step_{step:08d}") for step in (2, 4, 6, 8))
    assert [moments.shape[0] for moments in split.values()] == [2] * len(split)
    quiet = 0
    for name in split:
        assert [each[name].shape[0] for each in (joined, again, alone)] == [1, 2, 1]
        for before, after in (
            (split[name].mean(0, keepdim=True), joined[name]),
            (joined[name].expand(2, -1), again[name]),
            (again[name].mean(0, keepdim=True), alone[name]),
        ):
            # Steps only add to moments, and to those of the rows that they look up.
            assert (after >= before * (1 - 1e-6)).all()
            same = (before > 0) & torch.isclose(after, before, rtol=1e-6, atol=0)
            quiet += int(same.sum())
    assert quiet > 100  # rows that were looked up before and not again


def test_a_plan_that_splits_columns_alike_takes_the_moments_as_they_are(tmp_path: Path) -> None:
    options = (*OPTIONS, "parallel.sharding_types=[column_wise]")
    train_ranks(2, tmp_path / "whole", *options, "runtime.steps=4", base=TINY_DLRM)
    name = "checkpoints/step_00000002"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "resumed" / name)
    train_ranks(2, tmp_path / "resumed", *options, "runtime.steps=4", base=TINY_DLRM)
    whole, resumed = (saved_moments(tmp_path / run / "checkpoints/step_00000004") for run in ("whole", "resumed"))
    assert all(torch.equal(whole[each], resumed[each]) for each in whole)
    assert "converted" not in (tmp_path / "resumed" / "train.log").read_text()

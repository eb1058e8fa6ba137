"""What `optimizer.frozen` names does not move, table or layer, on one rank and on two, and a run resumes with it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models.ranking import RankingModel
from tests.distributed.checkpoint.test_incremental import saved
from tests.distributed.checkpoint.test_resume import training
from tests.launching import TINY, train_here, train_ranks
from tests.modules.factories import random_spec
from train.optim.frozen import freeze

# After an even number of steps the routers' biases could be back where they were.
FIRST = (*TINY, "model=interformer_moe", "model.moe.bias_update_rate=0.05", "runtime.steps=3")
FROZEN = ("*.embeddings.item", "*.embeddings.user.weight", "arch.layers.0", "embedding.assemble.request_dense.bias")
FREEZE = f"optimizer.frozen={list(FROZEN)}"


@pytest.mark.parametrize(
    ("ranks", "sharding"), [pytest.param(1, "table_wise", marks=pytest.mark.nightly), (2, "row_wise")]
)
def test_frozen_tensors_stay_and_the_others_learn(ranks: int, sharding: str, tmp_path: Path) -> None:
    kind = f"parallel.sharding_types=[{sharding}]"
    train_ranks(ranks, tmp_path / "first", kind, base=FIRST)
    load = (f"checkpoint.load='{tmp_path}/first'", "checkpoint.every=1", "checkpoint.keep=9")
    train_ranks(ranks, tmp_path / "tuned", kind, *load, FREEZE, base=FIRST)
    before, after = saved(tmp_path / "first"), saved(tmp_path / "tuned")
    frozen = [name for name in before if name.startswith("model.") and is_frozen(name)]
    assert len(frozen) > 10
    for name, value in before.items():
        if name.startswith("model."):
            assert torch.equal(value, after[name]) == (name in frozen), name
    assert not [name for name in after if is_frozen(name) and not name.startswith("model.")]  # no moments
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "tuned" / "checkpoints" / "step_00000001", resumed / "checkpoints" / "step_00000001")
    train_ranks(ranks, resumed, kind, *load, FREEZE, base=FIRST)
    assert [r.values["loss"] for r in training(resumed)] == [r.values["loss"] for r in training(tmp_path / "tuned")][1:]
    with pytest.raises(ValueError, match=r"was written with optimizer\.frozen=\['\*\.embeddings\.item', .*resume with"):
        train_here(resumed, base=FIRST)


def is_frozen(name: str) -> bool:
    parts = ("embeddings.item.", "embeddings.user.", "arch.layers.0.", "request_dense.bias")
    return any(part in name for part in parts)


def test_moments_of_what_was_frozen_are_asked_for_in_vain(tmp_path: Path) -> None:
    train_here(tmp_path / "first", "optimizer.frozen=[arch.layers.0]", base=FIRST)
    load = (f"checkpoint.load='{tmp_path}/first'", "checkpoint.load_what=optimizer")
    with pytest.raises(ValueError, match=r"the moments of optimizer\.frozen=.*checkpoint\.load_what=weights"):
        train_here(tmp_path / "next", *load, base=FIRST)
    train_here(tmp_path / "same", *load, "optimizer.frozen=[arch.layers.0]", base=FIRST)


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (["arch.layer.0"], "optimizer.frozen: 'arch.layer.0' matches no module and no parameter; closest are arch."),
        (["arch", "*_dense"], "leaves nothing to train but tables"),
    ],
)
def test_names_that_freeze_nothing_or_everything_are_refused(globs: list[str], message: str) -> None:
    spec = random_spec()
    model = RankingModel(FeatureEmbedding(spec, 8), nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 2)])}))
    with pytest.raises(ValueError, match=re.escape(message)):
        freeze(model, globs)

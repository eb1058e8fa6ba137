"""A new run takes from another model's checkpoint what fits, says what does not, and leaves that as it was made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.distributed.checkpoint.test_incremental import saved
from tests.launching import TINY, TINY_DLRM, train_here
from tests.processes import run_ranks
from train.trainer import Trainer

FIRST = (*TINY, "model.num_layers=1", "runtime.steps=1")
OTHER_HEAD = ("model.head_hidden=[24]", "checkpoint.load_what=partial")


class Started(Trainer):
    """Looks at what a run starts from."""

    def _start(self) -> None:
        fresh = {name: local(value).clone() for name, value in self.model.state_dict().items()}
        super()._start()
        earlier = saved(self.run_dir.with_name("first"))
        same_data = "other" not in self.run_dir.name
        for name, value in self.model.state_dict().items():
            fits = "heads" not in name or name.endswith(("trunks.0.2.bias", "trunks.1.2.bias"))
            taken = fits and (same_data or not name.startswith("embedding."))
            expected = rows_of(value, earlier[f"model.{name}"]) if taken else fresh[name]
            assert torch.equal(local(value), expected), name


def local(value: Tensor | ShardedTensor) -> Tensor:
    if isinstance(value, ShardedTensor):
        return torch.cat([shard.tensor for shard in value.local_shards()])
    return value


def rows_of(value: Tensor | ShardedTensor, whole: Tensor) -> Tensor:
    if not isinstance(value, ShardedTensor):
        return whole
    (shard,) = value.local_shards()
    first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
    return whole[first : first + count]


def start(folder: Path, name: str, *overrides: str) -> None:
    load = f"checkpoint.load='{folder}/first'"
    train_here(folder / name, load, "parallel.sharding_types=[row_wise]", *overrides, base=FIRST, trainer=Started)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_what_fits_is_taken_and_the_rest_is_named(ranks: int, tmp_path: Path) -> None:
    train_here(tmp_path / "first", base=FIRST)
    run_ranks(start, ranks, tmp_path, "next", *OTHER_HEAD)
    said = (tmp_path / "next" / "train.log").read_text()
    assert re.search(r"(\d+) of (?!\1)\d+ tensors are taken from .*first/checkpoints/step_00000001", said)
    assert "model.arch.heads.trunks.0.2.weight is [1, 16] there and [1, 24] here" in said
    run_ranks(start, ranks, tmp_path, "other", *OTHER_HEAD, "data.num_items=300", "optimizer.frozen=['arch.layers']")
    assert (
        "model.embedding.collection.embeddings.user.weight is of other data"
        in (tmp_path / "other" / "train.log").read_text()
    )


def test_a_checkpoint_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    train_here(tmp_path / "first", "model.dim=8", "runtime.steps=2", base=TINY_DLRM)
    with pytest.raises(ValueError, match=r"checkpoint\.load_what=partial: nothing in .* fits, e\.g\. .* meta\.json"):
        start(tmp_path, "next", *OTHER_HEAD, "data.num_items=300")

"""A run goes on with the weights of another on files that bring new ids, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.launching import TINY, train_here
from tests.processes import run_ranks
from train.checkpoint.load import resolve
from train.trainer import Trainer

OPTIONS = (
    *(override for override in TINY[1:] if not override.startswith("data.") or "batch" in override),
    "data=events",
    "data.user=user",
    "data.time=time",
    "+data.labels={click: click}",
    "data.request_categorical=[user]",
    "data.candidate_categorical=[item]",
    "data.candidate_numeric=[price]",
    "data.num_workers=0",
    "runtime.steps=4",
)
SHARDINGS = {1: "table_wise", 2: "row_wise"}


def write_day(folder: Path, day: int) -> None:
    """Day 1 has items 3 to 22, day 2 items 0 to 29, whose texts lie before, between and behind the others."""
    generator = np.random.default_rng(day)
    items = (3, 23) if day == 1 else (0, 30)
    table = {
        "user": generator.integers(9, size=120),
        "time": generator.integers(3000, size=120) + 90_000 * day,
        "item": generator.permuted(np.resize(np.arange(*items), 120)),
        "price": generator.exponential(day, size=120),
        "click": generator.integers(2, size=120),
    }
    pq.write_table(pa.table(table), folder / f"day{day}.parquet")


def train_day(folder: Path, day: int, *overrides: str, trainer: type[Trainer] = Trainer) -> None:
    files = (f"data.root='{folder}'", f"data.files=[day{day}.parquet]", f"data.cache_dir='{folder}/cache'")
    train_here(folder / f"run{day}", *files, *overrides, base=OPTIONS, trainer=trainer)


def ids(run_dir: Path, table: str) -> list[str | None]:
    """Id of each row of a table."""
    return [None, *pq.read_table(run_dir / "vocabulary" / f"{quote(table)}.parquet")["value"].to_pylist()]


def saved(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's best checkpoint, whole."""
    path = resolve(str(run_dir), None)
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


class Started(Trainer):
    """Looks at what a run starts from."""

    def _start(self) -> None:
        fresh = {name: self.local(name)[1].clone() for name in self.tables()}
        super()._start()
        day1 = self.run_dir.with_name("run1")
        before = saved(day1)
        for name in self.tables():
            first_row, rows = self.local(name)
            table = name.split(".")[-2]
            earlier, now = ids(day1, table), ids_of(self.source, table)
            assert now[: len(earlier)] == earlier
            for row, weights in enumerate(rows):
                if first_row + row < len(earlier):
                    torch.testing.assert_close(weights, before[f"model.{name}"][first_row + row], rtol=0, atol=0)
                else:
                    torch.testing.assert_close(weights, fresh[name][row], rtol=0, atol=0)
        taken = self.config.checkpoint.load_what == "optimizer"
        name, state = next(iter(self.optimizer.state_dict().items()))
        assert torch.equal(state["exp_avg"], before[f"dense.{name}.exp_avg"]) == taken
        for name in self.tables():
            state, key = self.model.fused_optimizer.state_dict()["state"][name], f"{name.split('.')[-2]}.momentum1"
            (shard,) = state[key].local_shards()
            first, end = shard.metadata.shard_offsets[0], len(before[f"tables.state.{name}.{key}"])
            earlier_sums = before[f"tables.state.{name}.{key}"][first : first + len(shard.tensor)]
            assert torch.equal(shard.tensor[: max(0, end - first)], earlier_sums) == taken
            assert not shard.tensor[max(0, end - first) :].any()

    def tables(self) -> list[str]:
        return [name for name in self.model.state_dict() if name.startswith("embedding.") and "item" in name]

    def local(self, name: str) -> tuple[int, torch.Tensor]:
        """(first row, rows) of this rank's shard."""
        (shard,) = self.model.state_dict()[name].local_shards()
        return shard.metadata.shard_offsets[0], shard.tensor


def ids_of(source: Any, table: str) -> list[str | None]:
    return [None, *pq.read_table(source.folder / "vocabulary" / f"{quote(table)}.parquet")["value"].to_pylist()]


def second_day(folder: str, sharding: str, moments: bool) -> None:
    train_day(
        Path(folder),
        2,
        f"data.vocabulary_of='{folder}/run1'",
        f"checkpoint.load='{folder}/run1'",
        f"checkpoint.load_what={'optimizer' if moments else 'weights'}",
        f"parallel.sharding_types=[{sharding}]",
        trainer=Started,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_known_ids_keep_their_weights_and_new_ones_get_rows_behind_them(ranks: int, tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    write_day(tmp_path, 2)
    train_day(tmp_path, 1, f"parallel.sharding_types=[{SHARDINGS[ranks]}]")
    (tmp_path / "day1.parquet").unlink()
    if ranks == 1:
        second_day(str(tmp_path), SHARDINGS[ranks], moments=False)
    else:
        run_ranks(second_day, ranks, str(tmp_path), SHARDINGS[ranks], True)
    assert set(ids(tmp_path / "run2", "item")) == {None, *map(str, range(30))}
    assert (tmp_path / "run2" / "results.json").exists()


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path, 1)
    write_day(tmp_path, 2)
    train_day(tmp_path, 1)
    start = f"checkpoint.load='{tmp_path}/run1'"
    with pytest.raises(ValueError, match=r"trained on data with another vocabulary.*data\.vocabulary_of=RUN_DIR"):
        train_day(tmp_path, 2, start)
    base = f"data.vocabulary_of='{tmp_path}/run1'"
    with pytest.raises(ValueError, match=r"optimizer\.sparse=rowwise_adagrad, this run has sgd"):
        train_day(tmp_path, 2, start, base, "optimizer.sparse=sgd", "checkpoint.load_what=optimizer")
    with pytest.raises(ValueError, match=r"is \[\d+, 16\] there and \[\d+, 32\] here"):
        train_day(tmp_path, 2, start, base, "model.dim=32")

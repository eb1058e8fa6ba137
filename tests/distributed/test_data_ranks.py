"""Ranks of one run share one preparation and, between them, every request."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import ProcessException

from tests.processes import run_ranks
from train.config.schema import EventsConfig, MovieLensConfig, RuntimeConfig
from train.data import build_source
from train.data.loading.loader import LoaderOptions, build_loader
from train.process import distributed
from train.process.heartbeat import Heartbeat

RANKS = 2


def test_one_rank_prepares_and_together_they_read_everything(tmp_path):
    run_ranks(read_share, RANKS, tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.name.startswith("movielens-")
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    assert len(shares[0]["steps"]) == len(shares[1]["steps"])
    assert [share["prepared"] for share in shares] == [True, False]
    source = build_source(MovieLensConfig(cache_dir=str(tmp_path / "cache")))
    expected = source.batch("test", np.arange(source.num_requests("test"))).row
    found = torch.cat([rows for share in shares for rows in share["steps"]])
    assert torch.equal(found.sort().values, expected.sort().values)


@pytest.mark.reliability("the rank that prepares data fails", "all ranks end with its error")
def test_what_stops_the_rank_that_prepares_is_the_error_of_all(tmp_path):
    (tmp_path / "log.csv").write_text("item,click\n1,1\n2,yes\n")
    run_ranks(read_bad_row, RANKS, tmp_path)
    errors = [(tmp_path / f"{rank}.txt").read_text() for rank in range(RANKS)]
    assert "log.csv, row 2: column 'click' is yes, expected a finite number" in errors[0]
    assert errors[1] == f"rank 0: {errors[0]}"


PATIENCE = 2.0
HANGS = 10 * PATIENCE


@pytest.mark.reliability(
    "the rank that prepares data hangs or is killed",
    "the others end within `runtime.collective_timeout`; a hung rank writes its stacks. Progress may take any time",
)
@pytest.mark.parametrize(
    ("prepare", "message"),
    [("hang", "rank 0 has made no progress for 2 s (runtime.collective_timeout)"), ("die", "rank 0 has died")],
)
def test_a_rank_that_prepares_no_longer_is_not_waited_for(tmp_path, prepare, message):
    with pytest.raises(ProcessException):
        run_ranks(wait_for_first, RANKS, tmp_path, prepare)
    told = (tmp_path / "told.txt").read_text()
    assert told.startswith(message)
    # After the last of the work, which itself took longer than the timeout.
    assert float((tmp_path / "waited.txt").read_text()) < PATIENCE + HANGS / 2


def wait_for_first(folder: Path, prepare: str) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    heartbeat = Heartbeat(distributed_c10d._get_default_store(), PATIENCE)  # ranks may start further apart
    world = dataclasses.replace(world, heartbeat=heartbeat)
    if not world.is_first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which it would end when rank 0 is dead
        (folder / "waiting.txt").touch()
    worked = folder / "worked.txt"

    def work() -> None:
        while not (folder / "waiting.txt").exists():
            time.sleep(0.01)
        begun = time.process_time()
        while prepare == "hang" and time.process_time() - begun < 1.5 * PATIENCE:
            pass
        worked.write_text(str(time.monotonic()))
        if prepare == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(HANGS)

    try:
        world.by_first(work)
    except RuntimeError as error:
        (folder / "waited.txt").write_text(str(time.monotonic() - float(worked.read_text())))
        (folder / "told.txt").write_text(str(error))
        raise


def read_bad_row(folder: Path) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    config = EventsConfig(
        cache_dir=str(folder / "cache"),
        files=[str(folder / "log.csv")],
        labels={"click": "click"},
        candidate_categorical=["item"],
    )
    with pytest.raises(ValueError) as raised:
        build_source(config, world.by_first)
    (folder / f"{world.rank}.txt").write_text(str(raised.value))
    distributed.stop()


def read_share(folder: Path) -> None:
    distributed_c10d.default_pg_timeout = timedelta(seconds=1)  # half an hour, which large files take longer than
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    rank = world.rank
    cache = folder / "cache"
    prepared = []

    def by_first(prepare: Callable[[], None]) -> None:
        def slowly() -> None:
            prepare()
            prepared.append(any(cache.iterdir()))
            time.sleep(2)

        world.by_first(slowly)

    source = build_source(MovieLensConfig(cache_dir=str(cache)), by_first)
    loader = build_loader(
        source,
        "test",
        LoaderOptions(batch_size=100, seed=0, rank=rank, world_size=RANKS, shuffle=True, num_workers=1, prefetch=2),
    )
    torch.save(
        {"prepared": prepared == [True], "steps": [batch.row.clone() for batch in loader]}, folder / f"{rank}.pt"
    )
    distributed.stop()

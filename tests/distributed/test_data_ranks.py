"""Ranks of one run share one preparation and, between them, every request."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch.distributed import distributed_c10d

from tests.processes import run_ranks
from train import distributed
from train.config import MovieLensConfig, RuntimeConfig
from train.data import build_source
from train.data.loader import build_loader

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


def read_share(folder: Path) -> None:
    distributed_c10d.default_pg_timeout = timedelta(seconds=1)  # half an hour, which large files take longer than
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    rank = world.rank
    cache = folder / "cache"
    prepared = []

    def barrier() -> None:
        prepared.append(rank == 0 and any(cache.iterdir()))
        time.sleep(2 * world.is_first)
        world.barrier()

    source = build_source(MovieLensConfig(cache_dir=str(cache)), rank, barrier)
    loader = build_loader(
        source, "test", batch_size=100, seed=0, rank=rank, world_size=RANKS, shuffle=True, num_workers=1, prefetch=2
    )
    torch.save(
        {"prepared": prepared == [True], "steps": [batch.row.clone() for batch in loader]}, folder / f"{rank}.pt"
    )
    distributed.stop()

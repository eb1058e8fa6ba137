"""The loader: a fixed order shared out over ranks, whatever the workers, and resumed where it stopped."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
import torch

from modules.batch import select_rows
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.interformer import InterFormer
from tests.launching import environment, python
from tests.modules.test_batch import assert_same
from train.config.schema import MovieLensConfig, SyntheticConfig
from train.data import build_source
from train.data.loading.loader import LoaderOptions, build_loader, reading
from train.data.source import PreparedSource


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    return build_source(MovieLensConfig(cache_dir=str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture(scope="module")
def synthetic():
    return build_source(SyntheticConfig(num_requests=1000, candidates=2))


def load(source, split="valid", **changes) -> list:
    settings = {
        "batch_size": 64,
        "seed": 0,
        "rank": 0,
        "world_size": 1,
        "shuffle": True,
        "num_workers": 0,
        "prefetch": 2,
    }
    loader = build_loader(source, split, LoaderOptions(**(settings | changes)))
    batches = list(loader)
    assert len(batches) == len(loader)
    return batches


def rows(batches) -> list[int]:
    return [row for batch in batches for row in batch.row.tolist()]


def test_every_request_comes_once_in_a_new_order_each_epoch(movielens):
    everything = sorted(movielens.batch("valid", np.arange(movielens.num_requests("valid"))).row.tolist())
    first, second = rows(load(movielens)), rows(load(movielens, epoch=1))
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert first == rows(load(movielens))
    assert first != rows(load(movielens, seed=1))
    in_order = load(movielens, shuffle=False)
    assert (torch.cat([batch.request_time for batch in in_order]).diff() >= 0).all()


@pytest.mark.parametrize("name", ["movielens", "synthetic"])
def test_workers_change_nothing(name, request):
    source = request.getfixturevalue(name)
    reference = load(source)
    for workers in (1, 2):
        batches = load(source, num_workers=workers)
        assert len(batches) == len(reference)
        for mine, theirs in zip(batches, reference, strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_each_global_batch(movielens, world_size):
    alone = load(movielens, batch_size=60)
    ranks = [
        load(movielens, batch_size=60 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for step, whole in enumerate(alone):
        shares = [batches[step] for batches in ranks]
        assert rows(shares) == rows([whole])
        sizes = [batch.num_requests for batch in shares]
        assert sum(sizes) == whole.num_requests
        assert max(sizes) - min(sizes) <= 1


def test_a_rank_without_rows_takes_the_step_with_an_empty_request(synthetic):
    ranks = [load(synthetic, "valid", batch_size=33, rank=rank, world_size=3) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    last = [batches[1] for batches in ranks]
    assert sorted((batch.num_requests, batch.num_candidates) for batch in last) == [(1, 0), (1, 0), (1, 2)]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 50), (2, 32), (3, 16)])
def test_resuming_goes_on_with_the_requests_that_are_left(movielens, world_size, batch_size):
    whole = rows(load(movielens, batch_size=50))
    consumed = 7 * 50
    before = rows(load(movielens, batch_size=50)[:7])
    ranks = [
        load(movielens, batch_size=batch_size, start=consumed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    after = [row for step in zip(*ranks, strict=True) for row in rows(step)]
    assert before + after == whole
    assert load(movielens, start=movielens.num_requests("valid")) == []


def test_resumed_batches_are_the_same_batches(movielens):
    whole = load(movielens, num_workers=1)
    for mine, theirs in zip(load(movielens, start=5 * 64, num_workers=2), whole[5:], strict=True):
        assert_same(mine, theirs)


def test_global_random_state_is_left_alone(movielens):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load(movielens, num_workers=1)
    assert torch.equal(torch.rand(4), expected)


def test_a_stream_that_is_shuffled_already_needs_no_permutation(synthetic):
    assert rows(load(synthetic, "train")) == list(range(2000))
    huge = build_source(replace(synthetic.config, num_requests=10**12))
    loader = build_loader(
        huge,
        "train",
        LoaderOptions(
            batch_size=4,
            seed=0,
            rank=1,
            world_size=2,
            start=8 * 10**9,
            shuffle=True,
            num_workers=0,
            prefetch=2,
        ),
    )
    assert len(loader) == (10**12 - 8 * 10**9) // 8
    assert next(iter(loader)).row[0] == 2 * (8 * 10**9 + 4)


class Broken(PreparedSource):
    """A source with an id that its table does not have."""

    def batch(self, split, requests):
        self._arrays["candidate_ids"] = np.full_like(self._arrays["candidate_ids"], 10**6)
        return super().batch(split, requests)


@pytest.mark.reliability("a loader worker fails", "the run ends with the worker's message")
def test_an_error_in_a_worker_arrives_with_its_message(movielens):
    _, (folder, max_history) = movielens.__reduce__()
    with pytest.raises(ValueError, match="id 1000000 of feature 'movie' at source row"):
        load(Broken(folder, max_history), num_workers=1)


@pytest.mark.reliability("SIGKILL to a loader worker", "the run ends with an error that says so")
def test_a_worker_that_is_killed_ends_the_run(synthetic):
    settings = {"batch_size": 8, "seed": 0, "rank": 0, "world_size": 1, "shuffle": True, "prefetch": 2}
    batches = iter(build_loader(synthetic, "train", LoaderOptions(num_workers=1, **settings)))
    next(batches)
    for worker in active_children():
        worker.kill()
    with pytest.raises(RuntimeError, match="(?i)worker.*(killed|exited)"):
        list(batches)


def test_workers_end_with_the_context(synthetic):
    settings = {"batch_size": 8, "seed": 0, "rank": 0, "world_size": 1, "shuffle": True, "prefetch": 2}
    with reading(build_loader(synthetic, "train", LoaderOptions(num_workers=1, **settings))) as batches:
        next(batches)
        assert active_children()
    assert not active_children()  # although `batches` is still there


READ = """
from multiprocessing import active_children, forkserver
from train.config.schema import SyntheticConfig
from train.data import build_source
from train.data.loading.loader import LoaderOptions, build_loader

if __name__ == "__main__":
    loader = build_loader(
        build_source(SyntheticConfig(num_requests=1000)), "train",
        LoaderOptions(batch_size=8, seed=0, rank=0, world_size=1, shuffle=True, num_workers=2, prefetch=2),
    )
    batches = iter(loader)
    next(batches)
    print(forkserver._forkserver._forkserver_pid, *(worker.pid for worker in active_children()), flush=True)
    input()
"""


@pytest.mark.reliability("SIGKILL to the process that reads batches", "its workers end too")
def test_workers_end_with_a_reader_that_was_killed(tmp_path):
    script = tmp_path / "read.py"
    script.write_text(READ)
    with subprocess.Popen(
        python(str(script)), env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        processes = [int(process) for process in reader.stdout.readline().split()]
        reader.kill()
    assert len(processes) == 3
    deadline = time.monotonic() + 30
    while any(running(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [process for process in processes if running(process)]
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left


def test_a_program_from_stdin_has_no_workers():
    done = subprocess.run(python("-"), env=environment(), input=READ, capture_output=True, text=True)
    assert "write the program to a file, or use data.num_workers=0" in done.stderr


def running(process: int) -> bool:
    """Whether it is there and not a zombie, which nobody waits for in some containers."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_sources_travel_to_workers_without_their_data(movielens):
    assert len(pickle.dumps(movielens)) < 1000
    copy = pickle.loads(pickle.dumps(movielens))
    assert_same(copy.batch("test", np.arange(20)), movielens.batch("test", np.arange(20)))


def test_padding_makes_sizes_come_back_and_changes_no_logit(synthetic):
    spec, (batch, *_), padded = synthetic.spec, load(synthetic), load(synthetic, pad_events=512)
    for times in (batch.history_times.to_dict() for batch in padded[:-1]):
        assert {values.values().numel() % 512 for values in times.values()} == {0}
    assert len({batch.num_requests for batch in padded[:-1]}) == 1
    (first, *_), added = padded, -(-512 // spec.histories[0].max_length)
    assert_same(select(first, 64), batch)
    assert first.candidate_offsets[64:].tolist() == [batch.num_candidates] * (added + 1)
    arch = build_arch(InterFormer.Config(dim=8, num_layers=1), spec)
    embedding = FeatureEmbedding(spec, 8, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(arch(embedding(first), first), arch(embedding(batch), batch))


def select(batch, num_requests):
    """The first requests of a batch whose others have no candidates."""
    requests = torch.arange(num_requests)
    lists = {
        name: select_rows(getattr(batch, name), requests) for name in ("request_sparse", "histories", "history_times")
    }
    rows = {name: getattr(batch, name)[:num_requests] for name in ("request_dense", "request_time")}
    return replace(batch, **lists, **rows, candidate_offsets=batch.candidate_offsets[: num_requests + 1])

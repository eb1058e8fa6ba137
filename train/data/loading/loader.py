"""Batches of one epoch in a fixed order, shared out over ranks, made in worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from modules.batch import RequestBatch
from train.data.batch import append_candidates, empty_batch, pad_events
from train.data.loading.dealing import Dealer
from train.data.loading.dropout import check_tables, drop_histories, drop_ids
from train.data.loading.sampling import sample_negatives, uniform_items
from train.data.source import PreparedSource, Source
from train.process.preemption import shield
from train.process.quiet import quieten
from train.process.signals import SIGNALS


def build_loader(
    source: Source,
    split: str,
    *,
    batch_size: int,
    seed: int,
    rank: int,
    world_size: int,
    epoch: int = 0,
    start: int = 0,
    shuffle: bool,
    num_workers: int,
    prefetch: int,
    negative_rate: float = 1,
    id_dropout: Mapping[str, float] | None = None,
    history_dropout: float = 0,
    pad_events: int = 0,
    uniform_negatives: int = 0,
    dealer: Dealer | None = None,
    pin_memory: bool = False,
) -> DataLoader:
    """This rank's batches of an epoch from its `start`-th request on; `len()` is their number, the same on every rank.

    The order depends on (seed, epoch) alone and its steps on `batch_size * world_size`, so a run that has consumed
    `start` requests over all ranks goes on exactly where it stopped, also with another number of ranks. A global batch
    is the next `batch_size * world_size` requests, the last one what is left; each rank takes an even, contiguous
    share, and one without a share gets a request without candidates, so that all ranks take the same number of steps.

    Batches do not depend on `num_workers`. Each worker is a process of one thread that keeps `prefetch` batches ready.
    `negative_rate` below 1: see `sample_negatives`, which draws by (seed, epoch); requests are counted before it.
    `id_dropout`, `history_dropout`: see `train.data.loading.dropout`, which draws likewise.
    `pad_events`: see `train.data.batch.pad_events`; 0 adds nothing.
    `dealer`: decides which of a global batch's requests are this rank's; the global batch is the same.
    `uniform_negatives`: so many items, drawn by (seed, epoch, the batch's first request and the rank), come behind each
    batch as candidates of a request of their own.
    """
    order = _Order(
        source.num_requests(split),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        start=start,
        shuffle_key=(seed, epoch) if shuffle and not source.shuffled else None,
        share=None if dealer is None else partial(_dealt, dealer, source, split, rank),
    )
    # The loader draws a number from its generator when it starts; one of its own keeps the global state, and with it
    # dropout, the same whether a run is resumed or not.
    return _Loader(
        _Batches(
            source,
            split,
            negative_rate,
            (seed, epoch),
            pad_events,
            id_dropout or {},
            history_dropout,
            uniform_negatives,
            rank,
        ),
        sampler=order,
        batch_size=None,
        collate_fn=_as_is,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=_begin,
        multiprocessing_context=_process_starter() if num_workers else None,
        generator=torch.Generator().manual_seed(seed),
    )


@contextmanager
def reading(loader: DataLoader) -> Iterator[Iterator[RequestBatch]]:
    """The loader's batches, whose workers end with the context.

    An iterator that is left to the garbage collector waits five seconds for each of its workers: the collector has
    closed the queues by which they would be told.
    """
    with closing(cast("Generator[RequestBatch, None, None]", iter(loader))) as batches:
        yield batches


class _Loader(DataLoader):
    """RuntimeError that says why when a worker has died, of which torch finds the end only."""

    def __iter__(self) -> Generator[Any, None, None]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                "a worker of the data loader was killed, perhaps by the system for want of memory: see its log, or "
                "use fewer, e.g. data.num_workers=2"
            ) from error
        except RuntimeError:
            source = self.dataset.source  # type: ignore[attr-defined]
            if isinstance(source, PreparedSource):  # a worker was killed in the moment in which its data was cut short
                source.check()
            raise


def _begin(worker: int) -> None:
    shield(worker)
    quieten()


def _process_starter() -> ForkServerContext:
    """Starts workers from a process without threads.

    This process has many, of gloo and of the checkpoint being written: fork() beside them hangs, now and then.
    ValueError when the program was read from stdin: workers import it once more.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if main.__spec__ is None and file is not None and not Path(file).exists():
        raise ValueError(
            f"data.num_workers is above 0 and the main module, which workers import, is {file}: write the program to a "
            "file, or use data.num_workers=0"
        )
    context = multiprocessing.get_context("forkserver")
    # Once for all workers, and not train.main: what is the main module they import under another name, with a warning.
    context.set_forkserver_preload(["train.trainer", "train.config.files"])
    # What is started here, workers included, inherits that signals are blocked; see shield.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # again: the start of the tracker ends it
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


class _Batches(Dataset):
    """Maps an array of request numbers to their batch."""

    def __init__(
        self,
        source: Source,
        split: str,
        negative_rate: float,
        sampling_key: tuple[int, int],
        pad_to: int,
        id_dropout: Mapping[str, float],
        history_dropout: float,
        negatives: int,
        rank: int,
    ) -> None:
        check_tables(id_dropout, source.spec)
        self.source = source
        self.split = split
        self.negative_rate = negative_rate
        self.sampling_key = sampling_key
        self.pad_to = pad_to
        self.id_dropout = {table: share for table, share in id_dropout.items() if share}
        self.history_dropout = history_dropout
        self.negatives = negatives
        self.rank = rank

    def __getitem__(self, requests: np.ndarray) -> RequestBatch:
        spec = self.source.spec
        batch = self._batch(requests)
        if self.negatives:
            first = int(requests[0]) if requests.size else 0
            key = (*self.sampling_key, first, self.rank)
            batch = append_candidates(batch, uniform_items(spec, self.negatives, key))
        if requests.size == 0:
            return batch
        return (pad_events(batch, spec, self.pad_to) if self.pad_to else batch).packed()

    def _batch(self, requests: np.ndarray) -> RequestBatch:
        if requests.size == 0:
            return empty_batch(self.source.spec)
        batch = self.source.batch(self.split, requests)
        if self.negative_rate < 1:
            batch = sample_negatives(batch, self.negative_rate, *self.sampling_key)
            if batch.num_requests == 0:
                return empty_batch(self.source.spec)
        if self.id_dropout:
            batch = drop_ids(batch, self.source.spec, self.id_dropout, *self.sampling_key)
        if self.history_dropout:
            batch = drop_histories(batch, self.history_dropout, *self.sampling_key)
        return batch


class _Order(Sampler):
    """Request numbers of each of a rank's batches."""

    def __init__(
        self,
        num_requests: int,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        start: int,
        shuffle_key: tuple[int, int] | None,
        share: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """`share`: this rank's requests of a whole global batch; None: an even, contiguous part."""
        self.share = share
        self.num_requests = num_requests
        self.global_batch = batch_size * world_size
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.shuffle_key = shuffle_key

    def __len__(self) -> int:
        return -(-max(self.num_requests - self.start, 0) // self.global_batch)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = None
        if self.shuffle_key is not None:
            order = np.random.default_rng(self.shuffle_key).permutation(self.num_requests)
        for begin in range(self.start, self.num_requests, self.global_batch):
            size = min(self.global_batch, self.num_requests - begin)
            if self.share is not None and size == self.global_batch:
                everyone = np.arange(begin, begin + size)
                yield self.share(everyone if order is None else order[everyone])
                continue
            first, end = (begin + share * size // self.world_size for share in (self.rank, self.rank + 1))
            yield np.arange(first, end) if order is None else order[first:end]


def _dealt(dealer: Dealer, source: Source, split: str, rank: int, requests: np.ndarray) -> np.ndarray:
    return requests[dealer.share(source.lengths(split, requests), rank)]


def _as_is(batch: Any) -> Any:
    return batch

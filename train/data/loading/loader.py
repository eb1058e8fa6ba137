"""Batches of one epoch in a fixed order, shared out over ranks, made in worker processes."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
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
from train.data.source import Source
from train.process.preemption import shield
from train.process.quiet import quieten
from train.process.signals import SIGNALS


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Which batches a rank gets of an epoch, and what is done with them. Random draws are by (seed, epoch)."""

    batch_size: int  # requests of this rank
    seed: int
    rank: int
    world_size: int
    epoch: int = 0
    start: int = 0  # the epoch's requests, over all ranks, that have been consumed
    shuffle: bool
    num_workers: int  # processes, of one thread each
    prefetch: int  # batches that each of them keeps ready
    negative_rate: float = 1  # below 1: `sample_negatives`; requests are counted before it
    id_dropout: Mapping[str, float] = field(default_factory=dict)  # see `train.data.loading.dropout`
    history_dropout: float = 0
    pad_events: int = 0  # see `train.data.batch.pad_events`; 0 adds nothing
    uniform_negatives: int = 0  # items, drawn anew for each batch and rank, as candidates of a request behind the batch
    dealer: Dealer | None = None  # decides which of a global batch's requests are this rank's
    pin_memory: bool = False


def build_loader(source: Source, split: str, options: LoaderOptions) -> DataLoader:
    """This rank's batches of an epoch from its `start`-th request on; `len()` is their number, the same on every rank.

    The order depends on (seed, epoch) alone and its steps on `batch_size * world_size`, so a run that has consumed
    `start` requests over all ranks goes on exactly where it stopped, also with another number of ranks. A global batch
    is the next `batch_size * world_size` requests, the last one what is left; each rank takes an even, contiguous
    share, and one without a share gets a request without candidates, so that all ranks take the same number of steps.
    Batches do not depend on `num_workers`.
    """
    # The loader draws a number from its generator when it starts; one of its own keeps the global state, and with it
    # dropout, the same whether a run is resumed or not.
    return _Loader(
        _Batches(source, split, options),
        sampler=_Order(source, split, options),
        batch_size=None,
        collate_fn=_as_is,
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch if options.num_workers else None,
        pin_memory=options.pin_memory,
        worker_init_fn=_begin,
        multiprocessing_context=_process_starter() if options.num_workers else None,
        generator=torch.Generator().manual_seed(options.seed),
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
            # A worker is killed in the moment in which its data is cut short.
            self.dataset.source.check()  # type: ignore[attr-defined]
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

    def __init__(self, source: Source, split: str, options: LoaderOptions) -> None:
        check_tables(options.id_dropout, source.spec)
        self.source = source
        self.split = split
        self.options = replace(options, dealer=None)  # which stays in this process
        self.id_dropout = {table: share for table, share in options.id_dropout.items() if share}
        self.sampling_key = (options.seed, options.epoch)

    def __getitem__(self, requests: np.ndarray) -> RequestBatch:
        spec, options = self.source.spec, self.options
        batch = self._batch(requests)
        if options.uniform_negatives:
            first = int(requests[0]) if requests.size else 0
            key = (*self.sampling_key, first, options.rank)
            batch = append_candidates(batch, uniform_items(spec, options.uniform_negatives, key))
        if requests.size == 0:
            return batch
        return (pad_events(batch, spec, options.pad_events) if options.pad_events else batch).packed()

    def _batch(self, requests: np.ndarray) -> RequestBatch:
        if requests.size == 0:
            return empty_batch(self.source.spec)
        batch = self.source.batch(self.split, requests)
        if self.options.negative_rate < 1:
            batch = sample_negatives(batch, self.options.negative_rate, *self.sampling_key)
            if batch.num_requests == 0:
                return empty_batch(self.source.spec)
        if self.id_dropout:
            batch = drop_ids(batch, self.source.spec, self.id_dropout, *self.sampling_key)
        if self.options.history_dropout:
            batch = drop_histories(batch, self.options.history_dropout, *self.sampling_key)
        return batch


class _Order(Sampler):
    """Request numbers of each of a rank's batches."""

    def __init__(self, source: Source, split: str, options: LoaderOptions) -> None:
        self.source, self.split, self.options = source, split, options
        self.num_requests = source.num_requests(split)
        self.global_batch = options.batch_size * options.world_size

    def __len__(self) -> int:
        return -(-max(self.num_requests - self.options.start, 0) // self.global_batch)

    def __iter__(self) -> Iterator[np.ndarray]:
        options, order = self.options, None
        if options.shuffle and not self.source.shuffled:
            order = np.random.default_rng((options.seed, options.epoch)).permutation(self.num_requests)
        for begin in range(options.start, self.num_requests, self.global_batch):
            size = min(self.global_batch, self.num_requests - begin)
            if options.dealer is not None and size == self.global_batch:
                whole = np.arange(begin, begin + size)
                requests = whole if order is None else order[whole]
                yield requests[options.dealer.share(self.source.lengths(self.split, requests), options.rank)]
                continue
            first, end = (begin + share * size // options.world_size for share in (options.rank, options.rank + 1))
            yield np.arange(first, end) if order is None else order[first:end]


def _as_is(batch: Any) -> Any:
    return batch

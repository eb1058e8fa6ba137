"""Score a split: `python -m train.evaluate run_dir=RUN_DIR split=test out=DIR`.

Runs alone or under torchrun. `run_dir=` takes the run's best checkpoint, or its newest when none was validated;
`checkpoint=` names one. The checkpoint's own configuration builds the model; further `key=value` arguments
override it (`data.path=...`, `data.batch_size=...`). Writes `metrics.json` and `predictions/*.parquet` (row, request,
group, events in the request's histories, weight, and for each task label, logit and probability) to `out`, by default
beside the checkpoint.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from modules.batch import RequestBatch
from modules.precision import in_high_precision
from train.build import Job, build
from train.checkpoint import load as checkpoint
from train.config.compose import from_dict
from train.config.overrides import split_options
from train.data.loading.loader import LoaderOptions, build_loader, reading
from train.data.requests import SPLITS
from train.evaluate.catalogue import evaluate_catalogue
from train.metrics.predictions import PredictionWriter
from train.metrics.tasks import TaskMetrics
from train.process import distributed
from train.process.files import write_json
from train.process.logs import setup_logging

log = logging.getLogger(__name__)


@torch.no_grad()
def evaluate(
    job: Job, loader: Iterable[RequestBatch], metrics: TaskMetrics, writer: PredictionWriter | None = None
) -> dict[str, float]:
    """Metrics of the loader's batches over all ranks; every rank gets the same values."""
    training = job.model.training
    job.model.eval()
    for batch in loader:
        batch = batch.to(job.world.device, non_blocking=True)
        with job.autocast():
            logits = job.model(batch)
        metrics.update(logits, batch.labels, batch.weights, batch.group, batch.candidate_offsets)
        if writer is not None:
            writer.write(batch, logits)
    job.model.train(training)
    return metrics.compute()


def split_loader(job: Job, split: str) -> DataLoader:
    """A split's batches in their order, of this rank."""
    world, data = job.world, job.config.data
    options = LoaderOptions(
        batch_size=data.eval_batch_size or data.batch_size,
        seed=0,
        rank=world.rank,
        world_size=world.size,
        shuffle=False,
        num_workers=data.num_workers,
        prefetch=data.prefetch,
        pin_memory=world.device.type == "cuda",
    )
    return build_loader(job.source, split, options)


def evaluate_split(
    job: Job, split: str, predictions: Path | None = None, *, steps: int = 0, quantized: bool = False
) -> tuple[dict[str, float], TaskMetrics]:
    """Exact metrics of a split (its first `steps` batches, 0 for all), with predictions written to a folder if named.

    Layers trained on MXFP8 operands are evaluated without quantisation, as in any other arm, unless `quantized`.
    """
    source, world = job.source, job.world
    metrics = TaskMetrics(
        job.losses,
        source.label_rates(),
        world.device,
        max_candidates=source.spec.max_candidates,
        exact_auc=True,
        own=job.metrics,
        top_k=job.config.tracking.top_k,
    )
    if predictions is not None and world.is_first:
        shutil.rmtree(predictions, ignore_errors=True)  # of an earlier evaluation, perhaps on more ranks
    world.barrier()
    high_precision = nullcontext() if quantized else in_high_precision(job.ranking_model)
    with high_precision, reading(split_loader(job, split)) as loaded:
        batches = islice(loaded, steps or None)
        if job.losses.next_item:
            return evaluate_catalogue(job, batches, job.config.tracking.top_k, predictions), metrics
        writer = PredictionWriter(predictions, source.spec.tasks, job.losses, world.rank) if predictions else None
        try:
            return evaluate(job, batches, metrics, writer), metrics
        finally:
            if writer is not None:
                writer.close()


@contextmanager
def trained(path: Path, overrides: list[str], log_dir: Path) -> Iterator[Job]:
    """The job of a checkpoint's configuration with these overrides, and its weights."""
    config = from_dict(checkpoint.read_meta(path)["config"], overrides)
    config.parallel.prefetch_tables = False  # what it locks in a cache, only a backward gives free
    world = distributed.start(config.runtime)
    try:
        setup_logging(log_dir, world.rank)
        job = build(config, world)
        checkpoint.check_data(path, job.source.fingerprint)
        checkpoint.load(path, job.model, None, world)
        yield job
    finally:
        distributed.stop()


def checked_split(split: str) -> str:
    """`split`; ValueError unless it names a split."""
    if split not in SPLITS:
        raise ValueError(f"split={split} is not known; choose {', '.join(SPLITS)}")
    return split


def main(arguments: list[str]) -> dict[str, float]:
    defaults = {"run_dir": "", "checkpoint": "", "split": "test", "out": ""}
    options, overrides = split_options(arguments, defaults, "run_dir=RUN_DIR split=test")
    split = checked_split(options["split"])
    path = checkpoint.resolve(options["run_dir"], options["checkpoint"])
    out = Path(options["out"] or path.with_name(f"{path.name}-{split}"))
    with trained(path, overrides, out) as job:
        values, _ = evaluate_split(job, split, out / "predictions")
        if job.world.is_first:
            write_json(out / "metrics.json", values)
            width = max(map(len, values))
            print("\n".join(f"{name:<{width}}  {value:.6g}" for name, value in values.items()))
            print(f"predictions: {out / 'predictions'}")
        job.world.barrier()
    return values

"""What a run trains with."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from torch import Tensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from modules.batch import RequestBatch
from train.build import build
from train.checkpoint.progress import Progress
from train.checkpoint.publish import Place, Publisher, run_id
from train.checkpoint.save import Checkpointer
from train.config.environment import to_saved
from train.config.schema import Config
from train.data.following import Follower
from train.data.loading.dealing import Cost, Dealer
from train.data.requests import SPLITS
from train.data.source import Source
from train.evaluate.distill import build_distillation
from train.optim.balance import Balance
from train.optim.dense import Optimizer
from train.optim.divergence import BadBatches
from train.optim.guards import FiniteGuard
from train.optim.objective import Objective
from train.parallel.prefetch import PrefetchPipeline
from train.process import length
from train.process.distributed import World
from train.record import versions
from train.record.launching import LaunchWatch
from train.record.meters import Meters
from train.record.run import Run

log = logging.getLogger(__name__)


class Parts:
    """The data, the step, and what is told of it and kept: built before the loop begins."""

    least_records = 24  # of training in a run: fewer points would be no curve

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.opened = Run(config, world)
        self.run_dir = self.opened.dir
        runtime, optimizer = config.runtime, config.optimizer

        # The data, and how far the run is in them.
        self.job = build(config, world)
        self.source, self.model = self.job.source, self.job.model
        self.training: Source = self.source  # which is that of newer files once there are any
        self.num_requests = self.training.num_requests("train")
        if self.num_requests == 0:
            raise ValueError("the training split holds no request; enlarge data.split[0] or bring more data")
        self.global_batch = config.data.batch_size * world.size
        self.progress = Progress()
        self.follower: Follower | None = None
        if config.data.is_open:
            self.follower = Follower(config, world, self.run_dir, self.source)
            self.progress.parts = self.follower.begin()
        self.total_steps = self._last_step()
        length.check(config, self.total_steps, validated=self.source.num_requests("valid") > 0, log_it=world.is_first)
        self.log_every = min(runtime.log_every, max(1, self.total_steps // self.least_records))
        self.logged_step = self.saved_step = 0  # the last one of each
        self.dealer: Dealer | None = None
        if config.parallel.balance and world.size > 1:
            sample = self.source.batch("train", np.arange(min(256, self.num_requests)))
            self.dealer = Dealer(Cost.measured(self.job.forward_flops, sample), world.size, config.parallel.balance)

        # A step.
        ranking_model = self.job.ranking_model
        graphs = runtime.cuda_graphs and world.device.type == "cuda"
        self.guard = FiniteGuard(
            ranking_model.embedding.assemble,
            world,
            window=self.log_every,
            locate=lambda row: self.training.locate(row),
            remembered=runtime.skip_window if runtime.bad_batch == "skip" else 0,
        )
        self.bad_batches = BadBatches(self.guard, skipped=runtime.bad_batch == "skip")
        self.optimizer = Optimizer(
            self.model, optimizer, self.total_steps // optimizer.accumulate, self.guard, graphs=graphs
        )
        self.distillation = build_distillation(self.job)
        self.objective = Objective(
            self.job.losses,
            self.source.spec,
            optimizer.task_weights | dict.fromkeys(self._unlabelled(), 0.0),
            None if self.distillation is None else self.distillation.loss,
            world.device,
        )
        kind = PrefetchPipeline if self.job.prefetches else TrainPipelineSparseDist
        self.pipeline = kind(self.model, self.optimizer, world.device, custom_model_fwd=self._forward)
        self.balance = Balance(ranking_model, world, graphs=graphs)

        # What is told of it, and kept.
        self.tracker = self.opened.tracker
        self.meters = Meters(self.job, self.total_steps, graphs=graphs)
        self.launches = LaunchWatch(config, world)
        self.checkpoints = Checkpointer(
            self.run_dir / "checkpoints", config.checkpoint.keep, config.checkpoint.async_save, world
        )
        self.publisher: Publisher | None = None
        if config.publish.every:
            place = Place(config.publish.to or self.run_dir / "published")
            self.publisher = Publisher(
                place, world.by_first(lambda: run_id(self.run_dir)), self.source.fingerprint, world
            )
        self.about: dict[str, Any] = {
            "config": to_saved(config),
            "plan": self.job.plan,
            "world_size": world.size,
            "data_fingerprint": self.source.fingerprint,
            "data_counts": {split: self.source.num_requests(split) for split in SPLITS} | self.source.label_rates(),
            "versions": versions.collect(),
        }

    def _last_step(self) -> int:
        """`runtime.steps`, or the step at which the last epoch ends for this many ranks and this batch size."""
        runtime, progress = self.config.runtime, self.progress
        epochs = progress.parts[-1]["end"] if progress.parts else runtime.epochs
        return runtime.steps or progress.step + progress.steps_left(self.num_requests, self.global_batch, epochs)

    def _unlabelled(self) -> list[str]:
        """Tasks of whose labels the training split has none, as of those that come late."""
        missing = self.source.missing()
        tasks = [task for task in self.source.spec.tasks if missing.get(task) == 1]
        if tasks and self.follower is None:
            if self.world.is_first:
                log.warning("no training row has a label of %s, whose weight in the loss is 0", ", ".join(tasks))
            return tasks
        return []

    def _forward(self, batch: RequestBatch) -> tuple[Tensor, tuple[Tensor, Tensor, RequestBatch]]:
        with self.job.autocast():
            outputs = self.model(batch)
        loss, of_labels, logits, weight = self.objective(self.job.arch, outputs, batch)
        self.optimizer.rows, self.optimizer.count = batch.row, weight
        return loss, (of_labels, logits, batch)

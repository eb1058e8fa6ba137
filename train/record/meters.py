"""What training measures of itself: loss, metrics and speed of a logging window, and the speed of the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from modules.batch import RequestBatch
from train.build import Job
from train.metrics import Throughput, history_lengths, history_sums, peak_flops
from train.metrics.tasks import TaskMetrics
from train.process.memory import peak_memory_bytes
from train.speedup.replay import Replay

WARMUP_STEPS = 10  # not counted in the speed of the whole run (half of a shorter one)


class Meters:
    """Sums over steps, on the device, which what reads them waits for. A logging window begins with each `reset`."""

    def __init__(self, job: Job, steps: int, *, graphs: bool) -> None:
        """`steps`: of the run; `graphs`: replay the sums of a step as a CUDA graph."""
        self.job, self.device = job, job.world.device
        self.metrics = TaskMetrics(
            job.losses,
            job.source.label_rates(),
            self.device,
            max_candidates=job.source.spec.max_candidates,
            exact_auc=False,
            top_k=job.config.tracking.top_k if job.losses.next_item else (),
        )
        peak = peak_flops(self.device, torch.bfloat16)
        self._of_window = Throughput(self.device, peak=peak)
        self._of_run = Throughput(self.device, peak=peak, warmup_steps=min(WARMUP_STEPS, steps // 2))
        self._clocks = self._of_window, self._of_run
        self._loss_sum = torch.zeros((), device=self.device)
        self._good_steps = torch.zeros((), device=self.device)  # counted in the sum
        self._skipped_steps = torch.zeros((), device=self.device)  # of the whole run
        self._add = Replay(self._add_step, graphs)

    def restore(self, skipped_steps: int) -> None:
        """Go on from a checkpoint of a run that has skipped so many steps."""
        self._skipped_steps.fill_(skipped_steps)

    def timed(self, batches: Iterator[RequestBatch]) -> Iterator[RequestBatch]:
        """The same batches; the wait for each is counted."""
        while True:
            with ExitStack() as stack:
                for clock in self._clocks:
                    stack.enter_context(clock.data_wait())
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for what is not training (validation, a checkpoint): its time is not counted."""
        with self._of_window.paused(), self._of_run.paused():
            yield

    def step(self, batch: RequestBatch, loss: Tensor, logits: Tensor, found_inf: Tensor) -> None:
        """Count a training step; one that was skipped (`found_inf` 1) counts in no loss or metric."""
        rows = batch.labels, batch.weights, batch.group
        history = self._add(found_inf, loss, logits, *rows, history_lengths(batch))
        for clock in self._clocks:
            clock.step(batch, history, self.job.losses.negatives)

    def window(self) -> dict[str, float]:
        """Values of the window so far, over all ranks."""
        throughput = self._of_window.compute(self.job.forward_flops)
        values = {"loss": self._window_loss(), **self.metrics.compute(), **throughput}
        values["skipped_steps"] = self._skipped_steps.item()
        values["peak_memory_bytes"] = self.peak_memory()
        return values

    def reset(self) -> None:
        """Begin the next window."""
        self.metrics.reset()
        self._of_window.reset()

    def whole_run(self) -> dict[str, float]:
        """Rates of the run so far over all ranks, without its first steps."""
        return self._of_run.compute(self.job.forward_flops)

    def skipped(self) -> int:
        """Steps of the whole run that were skipped."""
        return int(self._skipped_steps.item())

    def peak_memory(self) -> float:
        """Peak bytes of the rank that used most: shards are uneven."""
        peak = torch.tensor(peak_memory_bytes(self.device), dtype=torch.float64, device=self.device)
        if self.job.world.size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return peak.item()

    def _add_step(
        self,
        found_inf: Tensor,
        loss: Tensor,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor,
        group: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Add a step to the sums, unless it was skipped; returns its `history_sums`."""
        skipped = found_inf.bool()
        self._loss_sum += torch.where(skipped, 0, loss)
        self._good_steps += 1 - found_inf
        self._skipped_steps += found_inf
        self.metrics.update(logits, torch.where(skipped, torch.nan, labels), weights, group)
        return history_sums(lengths)

    def _window_loss(self) -> float:
        mean = self._loss_sum / self._good_steps  # NaN when every batch was skipped
        self._loss_sum.zero_()
        self._good_steps.zero_()
        if self.job.world.size > 1:
            dist.all_reduce(mean)
        return mean.item() / self.job.world.size

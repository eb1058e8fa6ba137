"""The training loop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from modules.batch import RequestBatch
from train.checkpoint import load as checkpoint
from train.checkpoint import warm_start
from train.checkpoint.state import model_state
from train.config.environment import to_saved
from train.data.loading.loader import LoaderOptions, build_loader, reading
from train.data.source import Source
from train.evaluate import evaluate_split
from train.metrics import ScoreHistogram
from train.parallel.managed import review
from train.process.files import write_json
from train.process.memory import reset_peak_memory
from train.process.preemption import Preempted
from train.process.signals import STATUS
from train.record.advice import advice, ending
from train.trainer.parts import Parts

log = logging.getLogger(__name__)


class Trainer(Parts):
    """One run: build, resume if the run directory holds a checkpoint, train, validate, test, write results."""

    def run(self) -> dict[str, Any]:
        """Train to the end and evaluate the test split on the best checkpoint; returns what `results.json` holds."""
        results: dict[str, Any] | None = None
        try:
            self._start()
            reset_peak_memory(self.world.device)
            started = time.monotonic()
            with self.opened.watched():
                while self._continues():
                    self._train_epoch()
            if self.progress.step > self.logged_step:  # stopped early, between two log lines
                self._log()
            self.checkpoints.wait()
            with self.optimizer.averaged(), self.tracker.between_steps():
                results = self._results(time.monotonic() - started)
        finally:
            self.opened.close(results)
        if self.world.is_first:
            if "ended" in results:  # a run of `train.commands.speed` has no end of its own
                log.info("%s", results["ended"])
            for sentence in results.get("advice", []):
                log.warning("%s", sentence)
        return results

    def _start(self) -> None:
        """Resume from the run directory's newest checkpoint, or take the weights of `checkpoint.load`."""
        saved = checkpoint.newest_intact(self.run_dir / "checkpoints", self.world)
        if saved is not None:
            checkpoint.check_data(saved, self.source.fingerprint, self.about["data_counts"])
            checkpoint.check_config(saved, dataclasses.asdict(self.config), to_saved(self.config))
            self.progress = checkpoint.load(saved, self.model, self.optimizer, self.world, verified=True)
            if self.follower is not None:
                self.progress.parts = self.progress.parts or self.follower.begin()
                self.follower.restore(self.progress.parts, self.progress.epoch, self.progress.consumed)
                self._take(self.follower.source)
            # With another number of ranks or another batch size, the same end is at another step.
            self.total_steps = self._last_step()
            self.optimizer.restore(self.progress.step, self.total_steps // self.config.optimizer.accumulate)
            self.balance.restore(self.progress.tokens_per_expert)
            self.meters.restore(self.progress.skipped_steps)
            if self.distillation is not None and self.distillation.adapter is not None:
                self.distillation.adapter.restore(self.progress.adapter)
            self.tracker.load_state_dict(self.progress.tracker)
            log.info("resumed from %s (step %d, epoch %d)", saved, self.progress.step, self.progress.epoch)
            self._intact_best()
        elif self.config.checkpoint.load:
            warm_start.load(self.config.checkpoint, self.model, self.optimizer, self.world, self.source)
        self.logged_step = self.saved_step = self.progress.step
        if self.world.is_first:
            write_json(self.run_dir / "config.json", self.about)
            self.source.keep_mapping(self.run_dir)
        self.tracker.start(self.about, total_steps=self.total_steps, resume_step=self.progress.step if saved else None)

    def _finished(self) -> bool:
        return self.progress.step >= self.total_steps or self._stopped_early()

    def _stopped_early(self) -> bool:
        stop = self.config.runtime.early_stop
        return bool(stop and self.progress.stale_validations >= stop)

    def _continues(self) -> bool:
        """Whether there is another epoch, for which this may wait until files come that the run has not seen."""
        used_up = self.follower is not None and self.progress.epoch >= self.progress.parts[-1]["end"]
        if not used_up or (self._finished() and (self._stopped_early() or self.config.runtime.steps)):
            return not self._finished()
        assert self.follower is not None
        if self.progress.step > self.saved_step and self._trusted():
            self._settle_tables()
            self._save()
        with self.meters.paused(), self.tracker.between_steps():
            more = self.follower.take(self.progress.parts, self.progress.epoch, self._between_files)
        if not more:
            return False
        self._take(self.follower.source)
        self.total_steps = self._last_step()
        self.optimizer.restore(self.progress.step, self.total_steps // self.config.optimizer.accumulate)
        self.tracker.extend(self.total_steps)
        return True

    def _between_files(self) -> None:
        self.opened.stall.passed(self.progress.step)
        if self.opened.preemption.agreed_now():
            self._stop()

    def _take(self, source: Source) -> None:
        """Train on this source from now on."""
        self.training, self.num_requests = source, source.num_requests("train")

    def _train_epoch(self) -> None:
        progress, data = self.progress, self.config.data
        self.model.train()
        options = LoaderOptions(
            batch_size=data.batch_size,
            seed=self.config.runtime.seed,
            rank=self.world.rank,
            world_size=self.world.size,
            epoch=progress.epoch,
            start=progress.consumed,
            shuffle=True,
            negative_rate=data.negative_rate,
            id_dropout=data.id_dropout,
            history_dropout=data.history_dropout,
            pad_events=data.pad_events,
            uniform_negatives=self.job.losses.negatives,
            dealer=self.dealer,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
            pin_memory=self.world.device.type == "cuda",
        )
        with reading(build_loader(self.training, "train", options)) as loaded:
            self._train_on(self.meters.timed(loaded))

    def _train_on(self, batches: Iterator[RequestBatch]) -> None:
        """Train on what is left of an epoch, or as many of its steps as the run has left."""
        progress, runtime = self.progress, self.config.runtime
        while not self._finished():
            begun = progress.consumed
            self._step(batches)
            parts = [consumed * runtime.evals_per_epoch // self.num_requests for consumed in (begun, progress.consumed)]
            epoch_done = progress.consumed >= self.num_requests
            if epoch_done:
                progress.epoch, progress.consumed = progress.epoch + 1, 0
            last = progress.step >= self.total_steps
            stopping = self.opened.preemption.agreed()
            within = parts[0] < parts[1] and not epoch_done
            ended = epoch_done and _every(progress.epoch, runtime.eval_epochs)
            validating = ended or within or last or _every(progress.step, runtime.eval_every)
            saving = validating or stopping or _every(progress.step, self.config.checkpoint.every)
            publishing = self.publisher is not None and (last or _every(progress.step, self.config.publish.every))
            if (saving or publishing) and (last or self._trusted()):
                self._settle_tables()  # what is validated is what is saved, and what is published
                if publishing:
                    self._publish()
                if validating:
                    self._validate()
                if saving:
                    self._save()
            if stopping and not self._finished():
                self._stop()
            if epoch_done:
                break

    def _stop(self) -> NoReturn:
        """End here: the next start of the run takes the remaining steps and writes the results."""
        self.checkpoints.wait()
        if self.progress.step > self.logged_step:
            self._log()
        log.info(
            "told to stop (status %d): step %d is saved, and the run goes on from it when it is started again with "
            "runtime.run_dir=%s",
            STATUS,
            self.saved_step,
            self.run_dir,
        )
        self.tracker.finish(status=STATUS)
        raise Preempted

    def _step(self, batches: Iterator[RequestBatch]) -> None:
        loss, logits, batch = self.pipeline.progress(batches)
        self.launches.launched()
        self.progress.step += 1
        if _every(self.progress.step, self.config.parallel.table_average_every):
            self._average_tables()
        if _every(self.progress.step, self.config.optimizer.accumulate):
            self.balance.step(self.optimizer.skipped)
        self.progress.consumed = min(self.progress.consumed + self.global_batch, self.num_requests)
        self.meters.step(batch, loss, logits, self.guard.found_inf)
        self.launches.accounted()
        self.opened.passed(self.progress.step)
        if _every(self.progress.step, self.log_every) or self._finished():
            self._log()

    def _average_tables(self) -> None:
        if self.job.copies is not None:
            self.job.copies.average()

    def _settle_tables(self) -> None:
        """Bring tables to where a run that begins here would have them."""
        self._average_tables()
        review(self.job.ranking_model.embedding)

    def _log(self) -> None:
        """The only place in the loop that waits for the device."""
        runtime = self.config.runtime
        self.checkpoints.check()
        self.bad_batches.report()
        bad = self.bad_batches.pop()
        values = self.meters.window()
        self.launches.report(values)
        values["lr"] = self.optimizer.lr
        if (violation := self.balance.violation()) is not None:
            values["load_violation"] = violation
        if self.dealer is not None:
            values |= self.dealer.compute()
            self.dealer.reset()
        shown = _every(self.progress.step, runtime.log_every) or self._finished()
        self.tracker.log(self.progress.step, "train", values, shown=shown)
        self.logged_step = self.progress.step
        self.meters.reset()
        if bad and runtime.bad_batch == "stop":
            self._fail(
                f"{bad[0]}. All weights and tables are finite; training went on until this log line "
                "(runtime.log_every). To go on in such a case, use runtime.bad_batch=skip."
            )
        self._refuse_divergence()

    def _refuse_divergence(self) -> None:
        step, saved = self.progress.step, self.saved_step
        if reason := self.bad_batches.divergence(step, saved, finished=self._finished()):
            self._fail(reason)

    def _fail(self, reason: str) -> NoReturn:
        self.checkpoints.wait()  # before all ranks and the process groups stop
        raise RuntimeError(reason)

    def _trusted(self) -> bool:
        """Whether the weights are worth a checkpoint. RuntimeError when the run has diverged."""
        self.bad_batches.report()
        self._refuse_divergence()
        return self.bad_batches.are_few(self.progress.step, self.saved_step)

    def _validate(self) -> None:
        """Metrics of the validation split, which decide what is best and when to stop early."""
        if self.source.num_requests("valid") == 0:
            return
        with self.meters.paused(), self.tracker.between_steps():
            self.pipeline.detach()
            with self.optimizer.averaged():
                values, _ = evaluate_split(self.job, "valid", steps=self.config.runtime.eval_steps)
            # The ids of the next batch, if there is one, have been exchanged already. By default `attach` would start a
            # second exchange and use its result, for which nothing waits.
            self.pipeline.attach(sparse_dist=False)
        self.tracker.log(self.progress.step, "valid", values)
        metrics = self.meters.metrics
        if not self.progress.validations and self.world.is_first:
            for task in metrics.base_rates:
                if values[f"{task}/label_rate"] in (0, 1):
                    log.warning("validation has labels of one class only of %s, whose NE and AUC say nothing", task)
        self.progress.judge(values, metrics.base_rates, self.objective.task_shares, metrics.best)

    def _save(self) -> None:
        self.progress.tokens_per_expert = self.balance.counts()
        self.progress.skipped_steps = self.meters.skipped()
        self.progress.tracker = self.tracker.state_dict()
        if self.distillation is not None and self.distillation.adapter is not None:
            self.progress.adapter = self.distillation.adapter.state()
        with self.meters.paused(), self.tracker.between_steps():
            self.checkpoints.save(self.model, self.optimizer, self.progress, self.about)
        self.saved_step = self.progress.step

    def _publish(self) -> None:
        """What an export of this step would hold. A place that cannot be written to does not end the run."""
        assert self.publisher is not None
        started = time.monotonic()
        with self.meters.paused(), self.tracker.between_steps(), self.optimizer.averaged():
            try:
                about = self.publisher.publish(model_state(self.model)["model"], self.progress.step)
            except OSError as error:
                log.warning("step %d is not published, the next version has all: %s", self.progress.step, error)
                return
        values = {"bytes": float(about["bytes"]), "seconds": time.monotonic() - started}
        self.tracker.log(self.progress.step, "publish", values, shown=False)

    def _intact_best(self) -> Path | None:
        """The best checkpoint, where it is not the newest. If another one was best, its validation is found again."""
        before = self.progress.best_step
        best = checkpoint.intact_best(self.run_dir / "checkpoints", self.progress, self.world)
        step = self.progress.best_step
        if step not in (0, before):
            values = [each.values for each in self.opened.records() if (each.step, each.split) == (step, "valid")]
            self.progress.best_values = values[-1] if values else {}
        return best

    def _results(self, seconds: float) -> dict[str, Any]:
        """Test metrics of the best checkpoint, plots, and `results.json`; validation and test are of one model."""
        best = self._intact_best()
        self.pipeline.detach()
        if best is not None:
            checkpoint.load(best, self.model, None, self.world, verified=True)
        results: dict[str, Any] = {
            "step": self.progress.step,
            "best_step": self.progress.best_step,
            "skipped_steps": self.meters.skipped(),
            "seconds": seconds,
            "label_rates": self.source.label_rates(),
            "peak_memory_bytes": self.meters.peak_memory(),
            **self.meters.whole_run(),
        }
        progress, early = self.progress, self._stopped_early()
        stale = progress.stale_validations
        results["ended"] = ending(progress.step, self.total_steps, progress.best_step, stale, early=early)
        measure = self.meters.metrics.measure
        results["advice"] = advice(self.config, progress.validations, progress.step, measure, early=early)
        histograms: dict[str, ScoreHistogram] = {}
        if self.progress.best_values:
            results["valid"], results["best_ne"] = self.progress.best_values, self.progress.best_ne
        if self.source.num_requests("test"):
            results["test"], metrics = evaluate_split(self.job, "test", self.run_dir / "predictions" / "test")
            self.tracker.log(self.progress.step, "test", results["test"])
            histograms = metrics.histograms()
        if "test" in results and self.config.precision.name.startswith("mxfp8"):
            results["test_quantized"], _ = evaluate_split(self.job, "test", quantized=True)

        self.opened.keep(results, histograms, progress.best_step, early=early)
        return results


def _every(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

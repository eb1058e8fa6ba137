"""What a run reports: `metrics.jsonl`, copies in W&B and TensorBoard, a progress bar and a final table.

`metrics.jsonl` is always written; W&B or TensorBoard is dropped with a warning if it fails, and never stops the run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tqdm import tqdm

from train.config.schema import TrackingConfig
from train.process.files import named
from train.process.signals import STATUS

if TYPE_CHECKING:
    from train.record.endpoint import Endpoint

METRICS_FILE = "metrics.jsonl"
CONSOLE_METRICS = (
    "loss",
    "lr",
    "ne",
    "auc",
    "gauc",
    "rmse",
    "mae",
    "accuracy",
    "pair_accuracy",
    "hr@10",
    "ndcg@10",
    "recall@20",
    "ndcg@20",
    "examples_per_s",
    "mfu",
)  # all other values are in the file only
WANDB_TIMEOUT = 30  # seconds for which a server that cannot be reached may delay the start of the run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A line of `metrics.jsonl`: the values of a split after `step` steps, at `time` in Unix seconds."""

    step: int
    split: str
    time: float
    values: dict[str, float]

    def to_json(self) -> str:
        # JSON has no NaN and no infinity; both are null and come back as NaN.
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return json.dumps({"step": self.step, "split": self.split, "time": self.time, "values": values})


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`; a last line that a killed process left unfinished is not one.

    Raises ValueError naming the line when another one is damaged.
    """
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            fields = json.loads(line)
            values = {name: math.nan if value is None else value for name, value in fields["values"].items()}
            records.append(Record(fields["step"], fields["split"], fields["time"], values))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number} is no metrics record ({error!r}); expected {{"step": 1, "split": "train", '
                '"time": 0.0, "values": {"loss": 0.5}}; delete the line to go on'
            ) from error
    return records


class Baseline:
    """The training losses of another run, which may be under way."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._losses: dict[int, float] = {}

    def gap(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """100 (loss - its loss) / its loss at this step, as `loss_gap_percent`; empty if it has not got there yet."""
        if step not in self._losses and self._file.exists():
            records = read_metrics(self._file)
            self._losses = {r.step: r.values["loss"] for r in records if r.split == "train" and "loss" in r.values}
        other, loss = self._losses.get(step), values.get("loss")
        return {"loss_gap_percent": 100 * (loss - other) / other} if other and loss is not None else {}


class _Mirror(Protocol):
    def log(self, step: int, split: str, values: Mapping[str, float]) -> None: ...

    def close(self, status: int) -> None: ...


class _Wandb:
    """One W&B run, offline or online. Steps are a metric of their own, so that a resumed run may go back in them."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig, config: dict[str, Any], run_id: str | None) -> None:
        import wandb  # imported here: it takes about half a second

        mode = tracking.wandb
        if mode == "auto":
            with_key = "WANDB_MODE" not in os.environ and wandb.login(prompt=False, verify=False)
            mode = os.environ.get("WANDB_MODE", "online" if with_key else "offline")
        # Options that are None leave W&B to its environment variables (WANDB_ENTITY, WANDB_RUN_GROUP, ...).
        self.run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            dir=run_dir,
            project=os.environ.get("WANDB_PROJECT", tracking.project),
            group=tracking.group,
            tags=tracking.tags or None,
            name=tracking.name or os.environ.get("WANDB_NAME", run_dir.name),
            id=run_id,
            resume="allow",
            config=config,
            settings=wandb.Settings(init_timeout=WANDB_TIMEOUT, silent=True),  # one line of ours for a dozen of its own
        )
        offline = f"offline, in {Path(self.run.dir).parent}; `wandb sync` uploads it"
        logger.info("W&B: %s", offline if self.run.offline else self.run.url)
        self.run.define_metric("train/step")
        self.run.define_metric("*", step_metric="train/step")

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        self.run.log({"train/step": step, **{f"{split}/{name}": value for name, value in values.items()}})

    def close(self, status: int) -> None:
        if status == STATUS:  # W&B then calls the run preempted, not failed
            self.run.mark_preempting()
        self.run.finish(exit_code=status)


class _TensorBoard:
    def __init__(self, run_dir: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier start of this run wrote for these steps is no longer shown.
        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=first_step)

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{split}/{name}", value, step)

    def close(self, status: int) -> None:
        self.writer.close()


class Tracker:
    """Records a run. Rank 0 makes it with `enabled`; on the others every method does nothing.

    Order of calls: `load_state_dict` if a checkpoint was loaded, `start`, then `advance` after every step and `log`
    when there is something to tell, `finish` at the end or on the way out of an error.
    """

    def __init__(self, run_dir: Path, tracking: TrackingConfig, *, enabled: bool) -> None:
        self.run_dir, self.tracking, self.enabled = run_dir, tracking, enabled
        self._wandb_run_id: str | None = None
        self._mirrors: dict[str, _Mirror] = {}
        self._file: TextIO | None = None
        self._bar: tqdm[Any] | None = None
        self._endpoint: Endpoint | None = None
        self._total_steps = 0
        self._baseline: Baseline | None = None

    def compare_with(self, run_dir: Path) -> None:
        """Log the gap to another run's training loss, at the same steps, beside one's own."""
        self._baseline = Baseline(run_dir / METRICS_FILE)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint of rank 0: what a resumed run needs to go on in the same W&B run."""
        return {"wandb_run_id": self._wandb_run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._wandb_run_id = state.get("wandb_run_id")

    def start(self, config: dict[str, Any], *, total_steps: int, resume_step: int | None = None) -> None:
        """Open the file and its mirrors. `config` goes to W&B.

        `resume_step` is the checkpoint's: records past it are dropped, since those steps are run again, and so is the
        evaluation of the test split. None starts anew, without the records of an earlier run in this directory.
        """
        if not self.enabled:
            return
        self._total_steps = total_steps
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / METRICS_FILE
        _rewind(path, -1 if resume_step is None else resume_step)
        self._file = path.open("a", encoding="utf-8")
        if self.tracking.wandb != "disabled":
            self._attempt("W&B", partial(self._open_wandb, config))
        if self.tracking.tensorboard:
            first_step = 0 if resume_step is None else resume_step + 1
            self._attempt("TensorBoard", partial(self._open_tensorboard, first_step))
        if self.tracking.http_port:
            self._attempt("the endpoint", partial(self._open_endpoint, resume_step or 0))
        if self.tracking.progress == "always" or (self.tracking.progress == "auto" and sys.stderr.isatty()):
            self._bar = tqdm(total=total_steps, initial=resume_step or 0, unit="step", dynamic_ncols=True)

    def extend(self, total_steps: int) -> None:
        """The run has become longer."""
        self._total_steps = total_steps
        if self._endpoint is not None:
            self._endpoint.total_steps = total_steps
        if self._bar is not None:
            self._bar.total = total_steps
            self._bar.refresh()

    def advance(self) -> None:
        """One step is done."""
        if self._endpoint is not None:
            self._endpoint.advance()
        if self._bar is not None:
            self._bar.update()

    def between_steps(self) -> AbstractContextManager[None]:
        """A context for validations, checkpoints and results: that no step ends in it is no sign of a hang."""
        return nullcontext() if self._endpoint is None else self._endpoint.between_steps()

    def log(self, step: int, split: str, values: Mapping[str, float], *, shown: bool = True) -> None:
        """Record values of a split (`train`, `valid`, `test`) after `step` steps, named like `loss`, `click/ne`.

        Values that are not `shown` are in the files, but not on the console.
        """
        if not self.enabled:
            return
        assert self._file is not None, "Tracker.log before Tracker.start"
        if self._baseline is not None and split == "train":
            values = {**values, **self._baseline.gap(step, values)}
        with named(self.run_dir / METRICS_FILE):
            self._file.write(Record(step, split, time.time(), dict(values)).to_json() + "\n")
            self._file.flush()
        for name, mirror in list(self._mirrors.items()):
            self._attempt(name, partial(mirror.log, step, split, values))
        brief = {name: value for name, value in values.items() if name.rsplit("/", 1)[-1] in CONSOLE_METRICS}
        text = " ".join(f"{name} {_number(value)}" for name, value in brief.items())
        if self._bar is not None and split == "train":
            self._bar.set_postfix_str(text)
        else:
            level = logging.INFO if shown else logging.DEBUG
            logger.log(level, "step %d/%d %s: %s", step, self._total_steps, split, text)

    def finish(self, results: Mapping[str, Mapping[str, float]] | None = None, *, status: int = 0) -> None:
        """Close everything; `results`, the last values by split, are shown as a table. A second call does nothing.

        `status`: the exit status with which the process will end.
        """
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for name, mirror in list(self._mirrors.items()):
            self._attempt(name, partial(mirror.close, status))
        self._mirrors.clear()
        if self._file is not None:
            file, self._file = self._file, None
            with named(self.run_dir / METRICS_FILE):
                file.close()
            if results:
                logger.info("results in %s\n%s", self.run_dir, format_table(results))

    def _open_wandb(self, config: dict[str, Any]) -> None:
        mirror = _Wandb(self.run_dir, self.tracking, config, self._wandb_run_id)
        self._mirrors["W&B"] = mirror
        self._wandb_run_id = mirror.run.id

    def _open_tensorboard(self, first_step: int) -> None:
        self._mirrors["TensorBoard"] = _TensorBoard(self.run_dir, first_step)

    def _open_endpoint(self, step: int) -> None:
        from train.record.endpoint import Endpoint  # imported here: it knows checkpoints, whose import takes seconds

        tracking = self.tracking
        address = (tracking.http_host, tracking.http_port)
        self._endpoint = Endpoint(self.run_dir, *address, step=step, total_steps=self._total_steps)
        self._mirrors["the endpoint"] = self._endpoint
        logger.info("metrics: http://%s:%s/metrics", *self._endpoint.address)

    def _attempt(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._mirrors.pop(name, None)
            logger.warning("%s FAILED, the run goes on without it (%s has every value): %r", name, METRICS_FILE, error)


def _rewind(path: Path, step: int) -> None:
    """Drop the records past `step`, and those of the test split, which every start evaluates at its end."""
    if not path.exists():
        return
    records = read_metrics(path)
    kept = [record for record in records if record.step <= step and record.split != "test"]
    if len(kept) < len(records):
        dropped = len(records) - len(kept)
        logger.info("%s: dropped %d of the %d records of an earlier start", path, dropped, len(records))
    aside = path.with_suffix(".partial")
    aside.write_text("".join(record.to_json() + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)


def format_table(results: Mapping[str, Mapping[str, float]], title: str = "split") -> str:
    """Values by split (or by what `title` names) as text: a row for each split and task, a column for each metric.

    Values that belong to no task are listed below.
    """
    metrics: dict[str, None] = {}
    rows: dict[tuple[str, str], dict[str, float]] = {}
    others = []
    for split, values in results.items():
        for name, value in values.items():
            task, _, metric = name.rpartition("/")
            if task:
                rows.setdefault((split, task), {})[metric] = value
                metrics[metric] = None
            else:
                others.append(f"{split} {name} {_number(value)}")
    cells = [[title, "task", *metrics]]
    cells += [[*row, *(_number(values[m]) if m in values else "" for m in metrics)] for row, values in rows.items()]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join((lines if rows else []) + others)


def _number(value: float) -> str:
    """Five digits after the point where NE and AUC differ, none for counts."""
    if abs(value) >= 100 or (abs(value) > 1 and float(value).is_integer()):
        return f"{value:,.0f}"
    return f"{value:.5f}" if abs(value) >= 0.01 else f"{value:.3g}"

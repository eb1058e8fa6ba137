"""Train a grid of configurations, one torchrun a job, rank them by validation and show their test metrics.

    python -m launch.sweep +experiment=NAME --over model=interformer,din runtime.seed=0,1,2 [--nproc 2] [--out DIR]

Every combination of the `--over` values runs through launch/torchrun.sh in a folder of its own under `--out`, beside
`results.md` and `results.csv`; over seeds the former has a table of means too. Settings are ranked by the NE of their
best validation, and the test split judges the chosen one alone: chosen by test metrics, it would look better than it
is. Hydra's own multirun is not used: it
runs all jobs in one set of processes, where a job's process groups and caches reach into the next. A job that fails is
reported and does not stop the others; the exit code is then 1. Starting again with the same `--out` runs only what is
not finished, also after SIGTERM or SIGUSR1, which it hands on to its jobs (exit code 75).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import mean, stdev

from train.commands.doctor import nvidia_smi
from train.config.overrides import split_values
from train.process.files import new_folder
from train.process.signals import SIGNALS, STATUS

SEED = "runtime.seed"
VALID = "best validation NE"
IN_CSV = ("examples", "label_rate", "log_loss")  # metrics that are the same in all jobs, or that NE implies
LAUNCHER = Path(__file__).with_name("torchrun.sh")


@dataclass
class Job:
    folder: Path
    values: dict[str, str]  # swept key -> value
    status: str = "waiting"
    seconds: float | None = None  # wall time of a job that ran in this start of the sweep
    metrics: dict[str, float] = field(default_factory=dict)  # of the test split
    best_ne: float | None = None  # of the validations

    def collect(self) -> bool:
        """Read what a finished run left; false when there is none."""
        file = self.folder / "results.json"
        if not file.exists():
            return False
        results = json.loads(file.read_text())
        self.status, self.metrics, self.best_ne = "ok", dict(results.get("test", {})), results.get("best_ne")
        return True


def grid(over: Iterable[str]) -> list[dict[str, str]]:
    """Every combination of `key=a,b,...`, the last key turning fastest."""
    axes: dict[str, list[str]] = {}
    for text in over:
        key, equals, values = text.partition("=")
        if not equals or not key or "" in split_values(values):
            raise ValueError(f"--over {text}: expected key=value,value, e.g. --over runtime.seed=0,1,2")
        if key in axes:
            raise ValueError(f"--over names {key} twice; write {key}={','.join(axes[key])},{values}")
        axes[key] = split_values(values)
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def plan(out: Path, overrides: list[str], over: list[str]) -> list[Job]:
    """The jobs of this sweep; results of those that an earlier start with the same folder finished are read."""
    combinations = grid(over)
    description = {"overrides": overrides, "jobs": combinations}
    record = out / "sweep.json"
    if record.exists() and json.loads(record.read_text()) != description:
        raise ValueError(f"{out} holds another sweep (see {record}); choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(description, indent=1))
    jobs = []
    for index, values in enumerate(combinations):
        label = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(values.values())).strip("-")
        jobs.append(Job(out / f"{index:02d}-{label}", values))
        jobs[-1].collect()
    return jobs


class Runner:
    """Runs jobs, at most `parallel` at a time, each with `nproc` processes and GPUs of its own where there are any."""

    def __init__(self, overrides: list[str], nproc: int, parallel: int = 1, module: str | None = None) -> None:
        """`module`: what a job runs; None leaves it to launch/torchrun.sh."""
        self.overrides, self.nproc, self.parallel, self.module = overrides, nproc, parallel, module
        self._running: set[subprocess.Popen[bytes]] = set()
        self._slots: SimpleQueue[dict[str, str]] = SimpleQueue()
        gpus = _visible_gpus()
        if gpus and parallel * nproc > len(gpus):
            times = f" of --parallel {parallel} jobs" if parallel > 1 else ""
            raise ValueError(
                f"--nproc {nproc}{times} needs more than the {len(gpus)} GPUs here; small jobs of a sweep can share "
                "one that CUDA_VISIBLE_DEVICES names several times, e.g. CUDA_VISIBLE_DEVICES=0,0"
            )
        for slot in range(parallel):
            own = ",".join(gpus[slot * nproc : (slot + 1) * nproc])
            self._slots.put({"CUDA_VISIBLE_DEVICES": own} if gpus else {})

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs. Told to stop, it stops them, waits until they have saved a checkpoint, and exits as they do."""
        for number in SIGNALS:  # by default it would end this process at once and leave the jobs behind
            signal.signal(number, lambda *_: sys.exit(STATUS))
        with ThreadPoolExecutor(self.parallel) as pool:
            try:
                for number, job in enumerate(pool.map(self._run, jobs), start=1):
                    name = _label(job.values) or job.folder.name
                    print(f"[{number}/{len(jobs)}] {name}: {job.status} ({job.seconds} s)", flush=True)
            except BaseException:  # an interrupted sweep takes its jobs with it
                pool.shutdown(wait=False, cancel_futures=True)
                for process in self._running.copy():
                    process.terminate()
                raise

    def _run(self, job: Job) -> Job:
        job.folder.mkdir(exist_ok=True)
        slot = self._slots.get()
        command = [str(LAUNCHER), *self.overrides, *(f"{key}={value}" for key, value in job.values.items())]
        run_dir = job.folder.absolute()
        # The job uses the torchrun and python of this process, also where their environment is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        own = {**slot, "PATH": path, "NPROC": str(self.nproc), "RUN_DIR": str(run_dir)}
        if self.module:
            own["MODULE"] = self.module
        environment = {"WANDB_RUN_GROUP": run_dir.parent.name, **os.environ, **own}
        start = time.monotonic()
        console = job.folder / "console.log"
        with console.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            self._running.add(process)
            code = process.wait()
            self._running.discard(process)
        self._slots.put(slot)
        job.seconds = round(time.monotonic() - start, 1)
        if code != 0:
            job.status = f"failed, exit code {code}: see {console}"
        elif not job.collect():
            job.status = f"failed, no results.json: see {console}"
        return job


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each for each in visible.split(",") if each]
    _, gpus = nvidia_smi()
    return [str(index) for index in range(len(gpus))]


def _label(values: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())


def write_tables(out: Path, jobs: list[Job]) -> str:
    """Write `results.csv`, one row a job in the order of the grid, and `results.md`, best first; returns the latter.

    Where seeds are an axis the markdown has a second table, of means over them. It leaves out the metrics in `IN_CSV`.
    Its last line is the setting with the smallest (mean) NE in validation, with its test metrics.
    """
    validated = [VALID] * any(job.best_ne is not None for job in jobs)
    metrics = sorted({name for job in jobs for name in job.metrics})
    shown = [name for name in metrics if name.rpartition("/")[2] not in IN_CSV]

    def table(jobs: list[Job], names: list[str]) -> tuple[list[str], list[list[str | float | None]]]:
        rows = [
            [
                *job.values.values(),
                job.status,
                job.seconds,
                *[job.best_ne] * len(validated),
                *map(job.metrics.get, names),
            ]
            for job in jobs
        ]
        return [*jobs[0].values, "status", "seconds", *validated, *names], rows

    with (out / "results.csv").open("w", newline="") as file:
        header, rows = table(jobs, metrics)
        csv.writer(file).writerows([header, *rows])
    text = _markdown(*table(sorted(jobs, key=_rank), shown))
    settings = _settings(jobs)
    if SEED in jobs[0].values:
        text += "\nMean ± standard deviation over seeds:\n\n" + _markdown(
            [*_axes(jobs), "seeds", *validated, *shown],
            (
                [*values, str(len(group)), *[_best_ne(group)] * len(validated), *_means(group, shown)]
                for values, group in settings
            ),
        )
    if validated:
        values, group = settings[0]
        named = " ".join(f"{key}={value}" for key, value in zip(_axes(jobs), values, strict=True)) or "the one setting"
        test = ", ".join(f"{name} {mean}" for name, mean in zip(shown, _means(group, shown), strict=True) if mean)
        text += f"\nChosen by validation: {named} (NE {_best_ne(group)}). On the test split: {test or 'nothing'}.\n"
    (out / "results.md").write_text(text)
    return text


def _axes(jobs: list[Job]) -> list[str]:
    return [key for key in jobs[0].values if key != SEED]


def _rank(job: Job) -> tuple[bool, float]:
    """Sorts by validation; jobs without one, such as those that failed, come last."""
    return job.best_ne is None, job.best_ne or 0.0


def _settings(jobs: list[Job]) -> list[tuple[tuple[str, ...], list[Job]]]:
    """Values of the axes but the seed, and the finished jobs that have them, the smallest mean NE first."""
    groups: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        if job.status == "ok":
            groups.setdefault(tuple(job.values[key] for key in _axes(jobs)), []).append(job)
    return sorted(groups.items(), key=lambda setting: _rank(_mean_job(setting[1])))


def _mean_job(group: list[Job]) -> Job:
    found = [job.best_ne for job in group if job.best_ne is not None]
    return replace(group[0], best_ne=mean(found) if found else None)


def _best_ne(group: list[Job]) -> str:
    return _spread([job.best_ne for job in group])


def _means(group: list[Job], metrics: list[str]) -> list[str]:
    return [_spread([job.metrics.get(name) for job in group]) for name in metrics]


def _spread(values: list[float | None]) -> str:
    """Mean and deviation of the values that there are."""
    found = [value for value in values if value is not None]
    spread = f" ± {stdev(found):.2g}" if len(found) > 1 else ""
    return f"{mean(found):.5g}{spread}" if found else ""


def _markdown(header: list[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    lines = [header, ["---"] * len(header), *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return (value or "").replace("|", "\\|")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="what all jobs share: +experiment=NAME, key=value")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder of further configurations, as of the training command"
    )
    parser.add_argument("--over", nargs="+", required=True, metavar="KEY=A,B", help="the axes of the grid")
    parser.add_argument("--nproc", type=int, default=2, help="processes a job")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--out", type=Path, help="folder of the sweep; default runs/sweep-<time>")
    options = parser.parse_intermixed_args(arguments)  # overrides may come before, between and after the options
    shared = options.overrides
    if options.config_dir:
        shared = ["--config-dir", str(options.config_dir.absolute()), *shared]
    try:
        grid(options.over)  # no folder is made for axes that cannot be read
        out = options.out or new_folder(Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}"))
        jobs = plan(out, shared, options.over)
        runner = Runner(shared, options.nproc, options.parallel)
    except ValueError as error:
        parser.error(str(error))
    runner.run([job for job in jobs if job.status != "ok"])
    print(write_tables(out, jobs))
    failed = [job for job in jobs if job.status != "ok"]
    print(
        f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished; tables: {out / 'results.md'}, {out / 'results.csv'}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

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

import json
import re
import time
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from launch.runs import Runner, parser_of, shared_by_all
from launch.trials import Trial, write_tables
from train.config.overrides import split_values
from train.config.secrets import refuse_secrets
from train.process import errors
from train.process.files import new_folder, write_json
from train.process.jobs import unfinished


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


def plan(out: Path, overrides: list[str], over: list[str]) -> list[Trial]:
    """The trials of this sweep; results of those that an earlier start with the same folder finished are read."""
    combinations = grid(over)
    claim(out, "sweep", {"overrides": overrides, "jobs": combinations})
    trials = [Trial(out / folder_of(index, values), values=values) for index, values in enumerate(combinations)]
    unfinished(trials)
    return trials


def claim(out: Path, what: str, description: Mapping[str, Any]) -> None:
    """Make `out` the folder of this sweep or search. ValueError if it is that of another one."""
    jobs = [f"{key}={value}" for job in description.get("jobs", ()) for key, value in job.items()]
    for text in (*description["overrides"], *description.get("space", ()), *jobs):
        refuse_secrets(dict([text.partition("=")[::2]]))
    record = out / f"{what}.json"
    if record.exists() and json.loads(record.read_text()) != description:
        raise ValueError(f"{out} holds another {what} (see {record}); choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(record, description)


def folder_of(index: int, values: Mapping[str, str]) -> str:
    label = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(values.values())).strip("-")
    return f"{index:02d}-{label}"


def finish(out: Path, trials: list[Trial]) -> int:
    """Write and print the tables; the exit code."""
    print(write_tables(out, trials))
    failed = [trial for trial in trials if trial.status != "ok"]
    done = f"{len(trials) - len(failed)} of {len(trials)} jobs finished"
    print(f"{done}; tables: {out / 'results.md'}, {out / 'results.csv'}")
    return int(bool(failed))


def main(arguments: list[str]) -> int:
    parser = parser_of("launch.sweep", __doc__)
    parser.add_argument("--over", nargs="+", required=True, metavar="KEY=A,B", help="the axes of the grid")
    parser.add_argument("--nproc", type=int, default=2, help="processes a job")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    parser.add_argument("--out", type=Path, help="folder of the sweep; default runs/sweep-<time>")
    options = parser.parse_intermixed_args(arguments)  # overrides may come before, between and after the options
    shared = shared_by_all(options)
    try:
        grid(options.over)  # no folder is made for axes that cannot be read
        out = options.out or new_folder(Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}"))
        trials = plan(out, shared, options.over)
        runner = Runner(shared, options.nproc, options.parallel)
    except ValueError as error:
        parser.error(str(error))
    runner.run(trials)
    return finish(out, trials)


if __name__ == "__main__":
    errors.run(main)

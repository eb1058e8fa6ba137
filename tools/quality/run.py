"""Many small trainings at a time on one machine: `python -m tools.quality.run JOBS.json --parallel 12 --out FOLDER`.

JOBS.json is a list of {"name": ..., "overrides": [...]}, the latter as of train/main.py, "by": "plain_din", "logistic"
or "variants" for that module's `train` in place of the trainer, "again": [...] for overrides of a further evaluation of
the test split, whose metrics are `again_test`. Each process takes one job after the other, so that imports are paid for
once a process and not once a job, and makes its own batches; the visible GPUs are dealt out to processes.
FOLDER/results.jsonl gets a line for each job as it ends; jobs that ended well there are not run again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.record import versions

if TYPE_CHECKING:
    from train.process.distributed import World

CONFIGS = str(Path(__file__).resolve().parents[2] / "configs")
QUIET = ("tracking.wandb=disabled", "tracking.tensorboard=false", "tracking.progress=never", "runtime.threads=1",
         "data.num_workers=0")  # fmt: skip

Results = dict[str, dict[str, Any]]  # by name of the job
Plan = Callable[[Results], list[dict[str, Any]]]


def configuration(overrides: list[str]) -> Config:
    return to_config(composed([*QUIET, *overrides]))


def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Metrics of one job: those of `results.json` without curves."""
    from train.process import distributed
    from train.trainer import Trainer

    config = configuration([*job["overrides"], f"runtime.run_dir='{folder}'"])
    again = configuration([*job["overrides"], *job["again"]]) if "again" in job else None
    if "by" in job:
        by = importlib.import_module(f"tools.quality.{job['by']}")
        return by.train(config, again and again.data)
    try:
        world = distributed.start(config.runtime)
        try:
            results = Trainer(config, world).run()
            if again is not None:
                results["again_test"] = _test_again(again, folder, world)
        finally:
            distributed.stop()
    finally:
        for name in ("checkpoints", "predictions"):
            shutil.rmtree(folder / name, ignore_errors=True)
    keys = ("step", "best_step", "seconds", "valid", "test", "again_test")
    return {key: results[key] for key in keys if key in results}


def _test_again(config: Config, folder: Path, world: World) -> dict[str, float]:
    """Metrics of a configuration's test split by a run's best weights."""
    from train.build import build
    from train.checkpoint import load as checkpoint
    from train.evaluate import evaluate_split

    best = checkpoint.best_checkpoint(folder / "checkpoints")
    if best is None:
        raise ValueError(f"{folder} has no checkpoint of a validation to test again; use runtime.evals_per_epoch=1")
    made = build(config, world)
    checkpoint.check_data(best, made.source.fingerprint)
    checkpoint.load(best, made.model, None, world)
    return evaluate_split(made, "test")[0]


def work(jobs: Connection, out: Path) -> None:
    """A process: its output goes to a file of its own."""
    sys.stdout = sys.stderr = open(out / f"worker_{os.getpid()}.log", "w", buffering=1)  # noqa: SIM115
    serve(jobs, out)


def serve(jobs: Connection, out: Path) -> None:
    """Answer each job with its line of results, until one is None."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"device": device, "commit": versions.collect()["commit"]}
    while (job := jobs.recv()) is not None:
        started = time.time()
        try:
            result = train(job, out / "runs" / _folder(job))
        except Exception as error:
            traceback.print_exc()
            result = _failure(error)
        if torch.cuda.is_available():  # other processes need what this job's model had
            gc.collect()
            torch.cuda.empty_cache()
        jobs.send(job | about | result | {"wall": round(time.time() - started, 1)})


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.run", description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    options = parser.parse_args(arguments)
    jobs = json.loads(options.jobs.read_text())
    return 0 if run(lambda _: jobs, options.out, parallel=options.parallel, seconds=options.seconds) else 1


def results(out: Path) -> Results:
    """The last line of each job that ended well, by name."""
    file = out / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["name"]: line for line in lines if "error" not in line}


def run(plan: Plan, out: Path, *, parallel: int = 1, seconds: float = 1e9) -> bool:
    """Run the jobs that have no result yet, in their order; whether all have one then.

    `plan` says which jobs the results so far call for. It is asked whenever a process is free, so that jobs may depend
    on the results of others. A job that fails is not tried again in the same call.
    """
    until = time.time() + seconds
    (out / "runs").mkdir(parents=True, exist_ok=True)
    tried: set[str] = set()
    prepared: set[tuple[str, ...]] = set()

    def left() -> list[dict[str, Any]]:
        found = results(out)
        return [job for job in plan(found) if job["name"] not in found]

    processes = _processes(min(parallel, len(left())) if seconds > 0 else 0, out)
    free, busy = list(processes), dict[Connection, dict[str, Any]]()
    while free or busy:
        waiting = [job for job in left() if job["name"] not in tried] if time.time() < until else []
        for connection, job in zip(tuple(free), waiting, strict=False):
            shutil.rmtree(out / "runs" / _folder(job), ignore_errors=True)  # of a job that was stopped
            tried.add(job["name"])
            try:
                prepare(job, prepared)
            except Exception as error:
                _keep(out, job | _failure(error))
                continue
            connection.send(job)
            free.remove(connection)
            busy[connection] = job
        if not busy:
            if not waiting:
                break
            continue
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            job = busy.pop(connection)
            try:
                line = connection.recv()
                free.append(connection)
            except (EOFError, ConnectionError) as error:  # its process died
                line = job | _failure(error)
            _keep(out, line)
    for connection in free:
        connection.send(None)
    for process in processes.values():
        process.join()
    print(f"{len(results(out))} jobs have a result; without: {[job['name'] for job in left()]}")
    return not left()


def _processes(number: int, out: Path) -> dict[Connection, BaseProcess]:
    """So many processes by their connections, each with one of the visible GPUs."""
    context = multiprocessing.get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    made: dict[Connection, BaseProcess] = {}
    try:
        for place in range(number):
            if len(gpus) > 1:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]  # for the process that starts next
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, out))
            process.start()
            theirs.close()
            made[ours] = process
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return made


def _keep(out: Path, line: dict[str, Any]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _failure(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


def _folder(job: dict[str, Any]) -> str:
    return re.sub(r"[^\w.=-]+", "_", job["name"])


def prepare(job: dict[str, Any], done: set[tuple[str, ...]]) -> None:
    """Prepare a job's data unless it is `done`, before processes that would all do it."""
    from train.data import build_source

    for again in ([], job["again"]) if "again" in job else ([],):
        overrides = [*job["overrides"], *again]
        # Composing takes half a second, and what says where data comes from tells data sets apart.
        data = tuple(each for each in overrides if each.lstrip("+").startswith(("experiment", "data")))
        if data not in done:
            build_source(configuration(overrides).data)
            done.add(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

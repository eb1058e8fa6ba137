"""Many small trainings at a time on one machine: `python -m tools.quality.run JOBS.json --parallel 12 --out FOLDER`.

JOBS.json is a list of {"name": ..., "overrides": [...]}, the latter as of train/main.py, "plain": true for the plain
DIN of `tools.quality.plain_din` in place of the model, "again": [...] for overrides of a further evaluation of the test
split, whose metrics are `again_test`. Each process takes one job after the other, so that imports are paid for once a
process and not once a job. FOLDER/results.jsonl gets a line for each job as it ends; jobs that ended well there are not
run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import re
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from train.config.compose import to_config
from train.config.schema import Config, register_schema

CONFIGS = str(Path(__file__).resolve().parents[2] / "configs")
QUIET = ("tracking.wandb=disabled", "tracking.tensorboard=false", "tracking.progress=never", "runtime.threads=1")


def configuration(overrides: list[str]) -> Config:
    register_schema()
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return to_config(compose("train", [*QUIET, *overrides]))


def train(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Metrics of one job: those of `results.json` without curves."""
    from tools.quality import plain_din
    from train import evaluate
    from train.checkpoint.load import best_checkpoint
    from train.process import distributed
    from train.trainer import Trainer

    config = configuration([*job["overrides"], f"runtime.run_dir='{folder}'"])
    again = configuration([*job["overrides"], *job["again"]]).data if "again" in job else None
    if job.get("plain"):
        return plain_din.train(config, again)
    try:
        world = distributed.start(config.runtime)
        try:
            results = Trainer(config, world).run()
        finally:
            distributed.stop()
        best = best_checkpoint(folder / "checkpoints") if again else None
        if best is not None:
            out = folder / "again"
            results["again_test"] = evaluate.main([f"checkpoint={best}", f"out={out}", *job["again"]])
    finally:
        for name in ("checkpoints", "predictions", "again"):
            shutil.rmtree(folder / name, ignore_errors=True)
    keys = ("step", "best_step", "seconds", "valid", "test", "again_test")
    return {key: results[key] for key in keys if key in results}


def work(jobs: multiprocessing.Queue, out: Path, until: float) -> None:
    """Take jobs until there are none or the time is up."""
    sys.stdout = sys.stderr = open(out / f"worker_{os.getpid()}.log", "w", buffering=1)  # noqa: SIM115
    while time.time() < until:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            return
        started = time.time()
        try:
            result = train(job, out / "runs" / _folder(job))
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        line = json.dumps(job | result | {"wall": round(time.time() - started, 1)})
        with (out / "results.jsonl").open("a") as file:
            file.write(line + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.run", description=__doc__.partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    options = parser.parse_args(arguments)
    jobs = json.loads(options.jobs.read_text())
    return 0 if run(jobs, options.out, parallel=options.parallel, seconds=options.seconds) else 1


def results(out: Path) -> dict[str, dict[str, Any]]:
    """The last line of each job that ended well, by name."""
    file = out / "results.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["name"]: line for line in lines if "error" not in line}


def run(jobs: list[dict[str, Any]], out: Path, *, parallel: int = 1, seconds: float = 1e9) -> bool:
    """Run the jobs that have no result yet; whether all have one then."""
    until = time.time() + seconds
    (out / "runs").mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if job["name"] not in results(out)]
    prepare(left)
    context = multiprocessing.get_context("spawn")
    pending = context.Queue()
    for job in left:
        shutil.rmtree(out / "runs" / _folder(job), ignore_errors=True)  # of a job that was stopped
        pending.put(job)
    time.sleep(0.5)  # a queue's feeder is a thread: its first items must be there before a process asks for one
    processes = [context.Process(target=work, args=(pending, out, until)) for _ in range(min(parallel, len(left)))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    pending.cancel_join_thread()
    failed = [job["name"] for job in jobs if job["name"] not in results(out)]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs have a result; without: {failed}")
    return not failed


def _folder(job: dict[str, Any]) -> str:
    return re.sub(r"[^\w.=-]+", "_", job["name"])


def prepare(jobs: list[dict[str, Any]]) -> None:
    """Prepare each data set once, before processes that would all do it."""
    from train.data import build_source

    done: set[str] = set()
    for job in jobs:
        data = configuration(job["overrides"]).data
        if repr(data) not in done:
            done.add(repr(data))
            build_source(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

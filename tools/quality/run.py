"""Many small trainings at a time on one machine: `python -m tools.quality.run JOBS.json --parallel 12 --out FOLDER`.

JOBS.json is a list of {"name": ..., "overrides": [...]}, the latter as of train/main.py, "plain": true for the plain
DIN of `tools.quality.plain_din` in place of the model. Each process takes one job after the other, so that imports are
paid for once a process and not once a job. FOLDER/results.jsonl gets a line for each job as it ends.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
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
    from train.process import distributed
    from train.trainer import Trainer

    config = configuration([*job["overrides"], f"runtime.run_dir='{folder}'"])
    if job.get("plain"):
        return plain_din.train(config)
    world = distributed.start(config.runtime)
    try:
        results = Trainer(config, world).run()
    finally:
        distributed.stop()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        shutil.rmtree(folder / "predictions", ignore_errors=True)
    return {key: results[key] for key in ("step", "best_step", "seconds", "valid", "test") if key in results}


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
            result = train(job, out / "runs" / job["name"].replace("/", "_"))
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
    until = time.time() + options.seconds
    jobs = json.loads(options.jobs.read_text())
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    prepare(jobs)
    context = multiprocessing.get_context("spawn")
    pending = context.Queue()
    for job in jobs:
        pending.put(job)
    time.sleep(0.5)  # a queue's feeder is a thread: its first items must be there before a process asks for one
    processes = [
        context.Process(target=work, args=(pending, options.out, until))
        for _ in range(min(options.parallel, len(jobs)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    pending.cancel_join_thread()
    lines = [json.loads(line) for line in (options.out / "results.jsonl").read_text().splitlines()]
    failed = [line["name"] for line in lines if "error" in line]
    print(f"{len(lines)} of {len(jobs)} jobs ended, {len(failed)} of them failed: {failed}")
    return 1 if failed or len(lines) < len(jobs) else 0


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

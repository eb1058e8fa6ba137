"""Speeds of several configurations on one GPU, one after the other:

    python -m tools.speeds OUT.jsonl ARMS.yaml [PART OF A NAME ...]

ARMS is a list of {name, limit, overrides}; `limit` are the seconds that an arm may take, and overrides may hold lists
of overrides. Each arm runs as in `train.commands.speed`, without torchrun, and appends a line to OUT: its rates and
memory, the loss of each logging window, versions and the commit, and with `traced: true` the times of five traced
steps. Arms whose names are in OUT are left out, so the same command goes on after an interruption. One with
`if_failed: NAME` runs only if that one has failed. With parts of names, arms that have none of them are left out.

    python -m tools.speeds OUT.jsonl --json FILE.json

writes the lines as one document, with what they have in common once.

All arms run in one process, which spares them imports and kernels that are compiled already. It is replaced when an arm
has failed, has run out of time, or has left memory behind on the device that would count for the next one.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import yaml

from train.process.files import write_json

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
LEFT_BEHIND = 2**30
"""Bytes on the device after an arm, above which the next one gets a process of its own."""
WORKER, JSON = "--worker", "--json"
COMMAND = [sys.executable, "-u", "-m", "tools.speeds"]
Row = dict[str, Any]


def rows_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, row: Row) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def arms_of(file: Path) -> list[Row]:
    return [{**arm, "overrides": _flat(arm["overrides"])} for arm in yaml.safe_load(file.read_text())]


def chosen(arms: list[Row], parts: list[str]) -> list[Row]:
    """Those whose names have one of the parts; ValueError for a part that no name has."""
    for part in parts:
        if not any(part in arm["name"] for arm in arms):
            raise ValueError(f"no arm is called {part!r}; they are {', '.join(arm['name'] for arm in arms)}")
    return [arm for arm in arms if not parts or any(part in arm["name"] for part in parts)]


def _flat(overrides: list[Any]) -> list[str]:
    parts = [_flat(each) if isinstance(each, list) else [each] for each in overrides]
    return [each for part in parts for each in part]


# The worker: it reads an arm from each line of its standard input and appends a row to the file.


def measure(arm: Row) -> Row:
    """What `train.commands.speed` would write of the arm's configuration, without the plan, and the losses."""
    from train.commands.speed import SpeedRun, check_steps
    from train.config.compose import to_config
    from train.config.files import composed
    from train.record.tracing import StepTracer
    from train.record.tracking import METRICS_FILE, read_metrics

    config = to_config(composed(arm["overrides"]))
    check_steps(config)
    with tempfile.TemporaryDirectory() as folder:
        config.runtime.run_dir = folder
        run = SpeedRun(config, _world(config))
        if not arm.get("traced"):
            run.tracer = StepTracer(0, Path(folder), run.world.device)
        results = run.run()
        records = [record.values for record in read_metrics(Path(folder) / METRICS_FILE)]
    return {name: value for name, value in results.items() if name != "plan"} | {
        "losses": [record["loss"] for record in records if "loss" in record]
    }


_worlds: list[Any] = []


def _world(config: Any) -> Any:
    """The process groups of the first arm, for all."""
    from train.process import distributed

    if not _worlds:
        _worlds.append(distributed.start(config.runtime))
    return _worlds[0]


def memory() -> int:
    """Bytes that tensors hold on the GPU, 0 without one."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def work(file: Path) -> None:
    from train.record import versions

    for number, line in enumerate(sys.stdin):
        arm, held, started = json.loads(line), memory(), time.monotonic()
        try:
            row = measure(arm)
        except Exception as error:
            traceback.print_exc()
            if number:  # perhaps for what an earlier arm has left behind: it gets a process of its own
                sys.exit(1)
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        seconds = time.monotonic() - started
        about = {"held_before_bytes": held, "seconds": seconds, "device": _device(), "versions": versions.collect()}
        append(file, arm | row | about)
        if "error" in row or memory() > LEFT_BEHIND:
            sys.exit(0)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Worker:
    """A process that measures one arm after the other."""

    def __init__(self, file: Path) -> None:
        self.file, self.measured = file, 0
        with file.with_suffix(".log").open("a") as log:
            self._process = subprocess.Popen(
                [*COMMAND, str(file), WORKER],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # with the loader's processes, which must not outlive it
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def run(self, arm: Row) -> str:
        """Measure; returns why there is no row, or nothing."""
        assert self._process.stdin is not None
        before, end = len(rows_of(self.file)), time.monotonic() + arm["limit"]
        try:
            self._process.stdin.write(json.dumps(arm) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return "the process ended before the arm"
        while time.monotonic() < end:
            over = self.ended
            if len(rows_of(self.file)) > before:
                self.measured += 1
                return ""
            if over:
                return f"the process ended with status {self._process.returncode}"
            time.sleep(0.2)
        self.stop()
        return f"took more than {arm['limit']} seconds"

    def stop(self) -> None:
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def together(rows: list[Row]) -> Row:
    """The rows without what all of them have in common, which stands before them."""
    common = {name: rows[-1][name] for name in ("device", "versions")}
    rows = [{name: value for name, value in row.items() if common.get(name) != value} for row in rows]
    return {"command": "python -m tools.speeds", **common, "rows": rows}


def main(arguments: list[str]) -> None:
    file = Path(arguments[0])
    if arguments[1] == WORKER:
        return work(file)
    if arguments[1] == JSON:
        return write_json(Path(arguments[2]), together(rows_of(file)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `finally`
    worker: Worker | None = None
    try:
        for arm in chosen(arms_of(Path(arguments[1])), arguments[2:]):
            failed = {row["name"]: "error" in row for row in rows_of(file)}
            if arm["name"] in failed or not failed.get(arm.get("if_failed"), True):
                continue
            while True:
                if worker is None or worker.ended:
                    worker = Worker(file)
                fresh = not worker.measured
                failure = worker.run(arm)
                if not failure or fresh or not worker.ended or failure.startswith("took"):
                    break
            if failure:
                append(file, arm | {"error": failure})
            print(_shown(rows_of(file)[-1]), flush=True)
    finally:
        if worker is not None:
            worker.stop()


def _shown(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    gib = row["each_rank"][0]["peak_memory_bytes"] / 2**30
    return f"{row['name']}: {row['examples_per_s']:,.0f} examples/s, {gib:.1f} GiB, {row['seconds']:.0f} s in all"


if __name__ == "__main__":
    main(sys.argv[1:])

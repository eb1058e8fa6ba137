"""Speeds of several configurations, one after the other:

    python -m tools.speeds OUT.jsonl ARMS.yaml [PART OF A NAME ...] [--group NAME] [--seconds S] [--tiny]

ARMS is a list of {name, limit, overrides}; `limit` are the seconds that an arm may take, and overrides may hold lists
of overrides. Each arm runs as in `train.commands.speed`, without torchrun, on `ranks` (1) GPUs, and appends a line to
OUT: its rates and memory, each step's loss, versions and the commit, and with `traced: true` the times of five traced
steps. Arms whose names are in OUT are left out, so the same command goes on after an interruption. One with
`if_failed: NAME` runs only if that one has failed. With parts of names, arms that have none of them are left out.
`--group` runs the arms of that `group`, `--seconds` begins none that could not end in time, and `--tiny` adds each
arm's `tiny` overrides: a rehearsal on CPUs.

    python -m tools.speeds OUT.jsonl --json FILE.json

writes the lines as one document, with what they have in common once.

All arms of one rank run in one process, which spares them imports and kernels that are compiled already. It is replaced
when an arm has failed, has run out of time, or has left memory behind on the device that would count for the next one.
Arms of several ranks have processes of their own, which import while the arm before runs: what another model has left
in streams and communicators can make two ranks wait for each other. `stays: true` keeps them for the next arm. One
that hangs writes where to its log, OUT.RANK.log.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import socket
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
LEAST = 20
"""Seconds that are left, below which no arm begins."""
SLOWER = 4
"""Times that CPUs which others use, too, take for a rehearsal."""
SAID = 400
"""Last lines of a log in which a failed arm's error is looked for."""
IDLE = ("/multiprocessing/", "_pin_memory_loop", "heartbeat.py", "<no Python frame>")
"""What only waits, among the stacks of a process that hangs."""
WORKER, JSON = "--worker", "--json"
COMMAND = [sys.executable, "-u", "-m", "tools.speeds"]
Row = dict[str, Any]


def rows_of(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(file: Path, row: Row) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def arms_of(file: Path) -> list[Row]:
    arms = yaml.safe_load(file.read_text())
    return [arm | {key: _flat(arm[key]) for key in ("overrides", "tiny") if key in arm} for arm in arms]


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


def configuration(arm: Row) -> Any:
    from train.commands.speed import check_steps
    from train.config.compose import to_config
    from train.config.files import composed

    config = to_config(composed(arm["overrides"]))
    check_steps(config)
    config.tracking.wandb, config.tracking.tensorboard = "disabled", False
    return config


def measure(arm: Row) -> Row:
    """What `train.commands.speed` would write of the arm's configuration, without the plan, and the losses."""
    from tools.layouts import LayoutRun

    config = configuration(arm)
    world = _world(config)
    with tempfile.TemporaryDirectory() as folder:
        config.runtime.run_dir = world.broadcast(folder)
        results = LayoutRun(config, world, traced=arm.get("traced", False)).run()
        world.barrier()  # before the folder of rank 0 goes
    return {name: value for name, value in results.items() if name != "plan"}


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

    first = os.environ.get("RANK", "0") == "0"
    if several := "RANK" in os.environ:
        prepare()
    for number, line in enumerate(sys.stdin):
        arm, held, started = json.loads(line), memory(), time.monotonic()
        faulthandler.dump_traceback_later(max(1, arm.pop("until") - 3 - time.time()))
        try:
            row = measure(arm)
        except Exception as error:
            traceback.print_exc()
            if number or several:  # perhaps for what an earlier arm has left behind, or on one rank
                os._exit(1)  # at once: other ranks may wait for this one
            row = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - started
        about = {"held_before_bytes": held, "seconds": seconds, "device": _device(), "versions": versions.collect()}
        if first:
            append(file, arm | row | about)
        if "error" in row or (several and not arm.get("stays")) or memory() > LEFT_BEHIND:
            os._exit(0)  # without waiting for other ranks


def prepare() -> None:
    """Import what an arm needs, here and in the process that loaders' workers are forked from."""
    import tools.layouts  # noqa: F401
    from train.data.loading.loader import _process_starter

    _process_starter()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


class Worker:
    """Processes, one a rank, that measure one arm after the other."""

    def __init__(self, file: Path, ranks: int = 1) -> None:
        self.file, self.ranks, self.measured = file, ranks, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        self._logs = [file.with_suffix(f".{rank}.log") for rank in range(ranks)]
        self._processes = []
        for rank, path in enumerate(self._logs):
            named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            several = {name: str(value) for name, value in named.items()} | meeting if ranks > 1 else {}
            with path.open("a") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*COMMAND, str(file), WORKER],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                        start_new_session=True,  # with the loader's processes, which must not outlive it
                        env={**os.environ, **several},
                    )
                )

    @property
    def ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def run(self, arm: Row) -> str:
        """Measure; returns why there is no row, or nothing."""
        before, end = len(rows_of(self.file)), time.monotonic() + arm["limit"]
        self._begun = [log.stat().st_size for log in self._logs]
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(arm | {"until": time.time() + arm["limit"]}) + "\n")
                process.stdin.flush()
        except BrokenPipeError:
            return "the process ended before the arm"
        while time.monotonic() < end:
            over = self.ended
            if len(rows_of(self.file)) > before:
                self.measured += 1
                return ""
            if over:
                time.sleep(self.ranks - 1)  # others may fail for the same reason, and say it
                self.stop()
                return "the process ended with status " + ", ".join(str(each.returncode) for each in self._processes)
            time.sleep(0.2)
        self.stop()
        return f"took more than {arm['limit']} seconds"

    def said(self) -> list[str]:
        """The end of each rank's log, without threads that only wait."""
        texts = [
            log.read_bytes()[begin:].decode(errors="replace")
            for log, begin in zip(self._logs, self._begun, strict=True)
        ]
        ends = ["\n".join(text.splitlines()[-SAID:]) for text in texts]
        parts = [part for end in ends for part in end.split("\n\n") if not any(each in part for each in IDLE)]
        return [line for part in parts for line in part.splitlines()]

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def together(rows: list[Row]) -> Row:
    """The rows without what all of them have in common, which stands before them."""
    common: Row = {name: row[name] for row in rows for name in ("device", "versions") if name in row}  # of the last
    rows = [{name: value for name, value in row.items() if common.get(name) != value} for row in rows]
    return {"command": "python -m tools.speeds", **common, "rows": rows}


def main(arguments: list[str]) -> None:
    if arguments[1] == WORKER:
        return work(Path(arguments[0]))
    if arguments[1] == JSON:
        return write_json(Path(arguments[2]), together(rows_of(Path(arguments[0]))))
    parser = argparse.ArgumentParser(prog="python -m tools.speeds")
    parser.add_argument("file", type=Path)
    parser.add_argument("arms", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--group")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--but", type=Path, help="a document of --json whose measured arms are left out")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    file, last = options.file, time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through `finally`
    measured = json.loads(options.but.read_text())["rows"] if options.but else []
    left_out = {row["name"] for row in measured if "error" not in row}
    group = [arm for arm in arms_of(options.arms) if options.group in (None, arm.get("group"))]
    arms = [arm for arm in chosen(group, options.parts) if arm["name"] not in left_out]
    worker: Worker | None = None
    spare: Worker | None = None
    stays = False
    try:
        for arm in arms:
            failed = {row["name"]: "error" in row for row in rows_of(file)}
            if arm["name"] in failed or not failed.get(arm.get("if_failed"), True):
                continue
            if (left := last - time.monotonic()) < LEAST:
                print(f"{arm['name']}: no time left", flush=True)
                continue
            tiny, ranks = arm.pop("tiny", []), arm.get("ranks", 1)
            arm["overrides"] += tiny if options.tiny else []
            arm["limit"] = min(arm["limit"] * (SLOWER if options.tiny else 1), left)
            while True:
                if worker is not None and ((ranks > 1 and not stays) or worker.ranks != ranks):
                    worker.stop()
                if worker is None or worker.ended:
                    if spare is not None and spare.ranks == ranks:
                        worker, spare = spare, None
                    else:
                        worker = Worker(file, ranks)
                if ranks > 1 and spare is None:
                    spare = Worker(file, ranks)
                fresh = not worker.measured
                failure = worker.run(arm)
                if not failure or fresh or not worker.ended or failure.startswith("took"):
                    break
            stays = arm.get("stays", False)
            if failure:
                append(file, arm | {"error": failure, "said": worker.said()})
                print(*worker.said(), sep="\n")
            print(_shown(rows_of(file)[-1]), flush=True)
    finally:
        for each in (worker, spare):
            if each is not None:
                each.stop()


def _shown(row: Row) -> str:
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    gib = row["each_rank"][0]["peak_memory_bytes"] / 2**30
    return f"{row['name']}: {row['examples_per_s']:,.0f} examples/s, {gib:.1f} GiB, {row['seconds']:.0f} s in all"


if __name__ == "__main__":
    main(sys.argv[1:])

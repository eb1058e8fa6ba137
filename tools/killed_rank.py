"""How long a run stands still when a rank is killed: `python -m tools.killed_rank OUT.json [key=value ...]`.

Trains `+experiment=synthetic_h200` (or what the overrides say) on two ranks by launch/torchrun.sh, kills the second by
SIGKILL a few steps after the second checkpoint, and writes the seconds from there to the log line of the resumption and
to the next step. A minute and a half on two GPUs; `LIMIT` seconds at most.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from train.record.tracking import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 240
EVERY = 50
"""Steps between checkpoints."""
RUN = (
    *("+experiment=synthetic_h200", "runtime.steps=100000", "data.num_requests=100000000", "runtime.log_every=1"),
    *(f"checkpoint.every={EVERY}", "tracking.wandb=disabled", "tracking.tensorboard=false", "tracking.progress=never"),
)


def steps(run_dir: Path) -> list[tuple[int, float]]:
    """Each logged step and when it was, in Unix seconds."""
    file = run_dir / METRICS_FILE
    return [(each.step, each.time) for each in read_metrics(file) if each.split == "train"] if file.exists() else []


def process_of(rank: int, run_dir: Path) -> int:
    """The training process of a rank, whose loader workers have its environment, too."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # of another user, or over
            continue
        if {f"RANK={rank}".encode(), f"RUN_DIR={run_dir}".encode()} <= {*variables} and b"train.main" in command:
            return int(folder.name)
    raise RuntimeError(f"no process of rank {rank} of {run_dir}")


def main(file: Path, overrides: list[str]) -> None:
    end = time.monotonic() + LIMIT
    with tempfile.TemporaryDirectory() as folder:
        run_dir, console = Path(folder, "run"), Path(folder, "console.log")
        variables = {**os.environ, "NPROC": "2", "MAX_RESTARTS": "1", "RUN_DIR": str(run_dir)}
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        with console.open("w") as output:
            run = subprocess.Popen(
                [str(ROOT / "launch/torchrun.sh"), *RUN, *overrides],
                env=variables,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

        def until(what: str, reached: Callable[[], bool]) -> None:
            while not reached():
                if run.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"{what}: not within {LIMIT} s, or the run has ended\n{console.read_text()[-3000:]}"
                    )
                time.sleep(0.1)

        started = time.time()
        try:
            until("steps", lambda: len(steps(run_dir)) > 2 * EVERY + 5)
            first = steps(run_dir)[0][1] - started
            os.kill(process_of(1, run_dir), signal.SIGKILL)
            killed, last = time.time(), steps(run_dir)[-1][0]
            until("resumption", lambda: "resumed from" in (run_dir / "train.log").read_text())
            resumed = time.time()
            until("a step after it", lambda: steps(run_dir)[-1][1] > resumed)
        finally:
            run.terminate()
            run.wait()
        after, at = next(pair for pair in steps(run_dir) if pair[1] > resumed)
    row = {
        "overrides": overrides,
        "seconds_to_the_first_step": first,
        "seconds_to_the_resumption": resumed - killed,
        "seconds_to_the_next_step": at - killed,
        "steps_taken_again": last - after + 1,
    }
    file.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

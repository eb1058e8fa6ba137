"""How a configuration scales: train it on several numbers of ranks of this host, the batch of each staying the same.

    python -m launch.scaling +experiment=NAME runtime.steps=100 [key=value] [--nproc 1,2,4] [--out DIR]

Each number of ranks runs `train.commands.speed` through launch/torchrun.sh in a folder of its own under `--out`, one
after the other, beside `scaling.md` and `scaling.json`. Efficiency is the examples per second and rank over those of
the fewest ranks. A run that fails is reported and does not stop the others; the exit code is then 1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.runs import Runner, parser_of, shared_by_all
from train.process import errors
from train.process.files import new_folder, write_json
from train.process.jobs import Job

GIB = 2**30
COLUMNS = (
    "ranks", "examples/s", "steps/s", "efficiency", "waiting for data", "peak memory of a rank", "a step, traced",
    "NCCL", "NCCL alone", "idle",
)  # fmt: skip


@dataclass
class Scale(Job):
    speed: dict[str, Any] = field(default_factory=dict)

    result = "speed.json"  # of train.commands.speed, which would import all of torch

    def take(self, results: dict[str, Any]) -> None:
        self.speed = results


def table(speeds: list[dict[str, Any]]) -> str:
    """Markdown: a row for each result of `train.commands.speed`; times are of rank 0, and none without a GPU."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for speed in speeds:
        rate = speed["examples_per_s"] / speed["ranks"]
        peak = max(rank["peak_memory_bytes"] for rank in speed["each_rank"])
        spent = speed["each_rank"][0]["breakdown"]
        names = ("wall", "communication", "communication alone", "idle")
        lines.append(
            (
                str(speed["ranks"]),
                f"{speed['examples_per_s']:,.0f}",
                f"{speed['steps_per_s']:.2f}",
                f"{rate / (speeds[0]['examples_per_s'] / speeds[0]['ranks']):.1%}",
                f"{speed['data_wait_share']:.1%}",
                f"{peak / GIB:.1f} GiB",
                *(f"{spent[name]:.1f} ms" if name in spent else "" for name in names),
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = parser_of("launch.scaling", __doc__)
    parser.add_argument("--nproc", default="1,2,4", help="numbers of ranks, fewest first")
    parser.add_argument("--out", type=Path, help="folder of the runs; default runs/scaling-<time>")
    options = parser.parse_intermixed_args(arguments)  # overrides may come before, between and after the options
    shared = shared_by_all(options)
    try:
        counts = sorted({int(count) for count in options.nproc.split(",")})
        runners = [Runner(shared, count, module="train.commands.speed") for count in counts]
    except ValueError as error:
        parser.error(str(error))
    if options.out and options.out.exists():
        parser.error(f"--out {options.out} is there already; name a new folder")
    out = options.out or new_folder(Path(f"runs/scaling-{time.strftime('%Y%m%d-%H%M%S')}"))
    jobs = [Scale(out / f"ranks-{count}") for count in counts]
    for runner, job in zip(runners, jobs, strict=True):
        runner.run([job])
    done = [job.speed for job in jobs if job.status == "ok"]
    if done:
        (out / "scaling.md").write_text(table(done))
        write_json(out / "scaling.json", {"overrides": options.overrides, "runs": done})
        print(table(done))
    return int(len(done) < len(jobs))


if __name__ == "__main__":
    errors.run(main)

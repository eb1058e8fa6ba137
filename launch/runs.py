"""Jobs through launch/torchrun.sh, each with processes, a folder and GPUs of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from launch.trials import Trial
from train.commands.doctor import nvidia_smi
from train.process import jobs
from train.process.jobs import Job, Launch

LAUNCHER = Path(__file__).with_name("torchrun.sh")


def parser_of(module: str, docstring: str) -> argparse.ArgumentParser:
    """With what all commands take that start such jobs."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=docstring.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="what all jobs share: +experiment=NAME, key=value")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder of further configurations, as of the training command"
    )
    return parser


def shared_by_all(options: argparse.Namespace) -> list[str]:
    """The arguments that every job has."""
    folder = ["--config-dir", str(options.config_dir.absolute())] if options.config_dir else []
    return [*folder, *options.overrides]


class Runner:
    """Runs jobs, at most `parallel` at a time, each with `nproc` processes and GPUs of its own where there are any."""

    def __init__(self, overrides: list[str], nproc: int, parallel: int = 1, module: str | None = None) -> None:
        """`module`: what a job runs; None leaves it to launch/torchrun.sh. ValueError for too few GPUs."""
        self.overrides, self.nproc, self.module = overrides, nproc, module
        gpus = _visible_gpus()
        if gpus and parallel * nproc > len(gpus):
            times = f" of --parallel {parallel} jobs" if parallel > 1 else ""
            raise ValueError(
                f"--nproc {nproc}{times} needs more than the {len(gpus)} GPUs here; small jobs of a sweep can share "
                "one that CUDA_VISIBLE_DEVICES names several times, e.g. CUDA_VISIBLE_DEVICES=0,0"
            )
        owned = [",".join(gpus[slot * nproc : (slot + 1) * nproc]) for slot in range(parallel)]
        self.slots: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": own} if gpus else {} for own in owned]

    def run(self, waiting: Iterable[Job]) -> None:
        """Run the jobs that are not finished; a line tells of each when it ends."""
        left = [job for job in waiting if job.status != "ok"]
        told = 0

        def ended(job: Job) -> None:
            nonlocal told
            told += 1
            name = (job.label if isinstance(job, Trial) else "") or job.folder.name
            print(f"[{told}/{len(left)}] {name}: {job.status} ({job.seconds} s)", flush=True)

        jobs.run(left, self._launch, self.slots, ended)

    def _launch(self, job: Job) -> Launch:
        folder = job.folder.absolute()
        values = [f"{key}={value}" for key, value in job.values.items()] if isinstance(job, Trial) else []
        variables = {
            "WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", folder.parent.name),
            # The job uses the torchrun and python of this process, also where their environment is not activated.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "NPROC": str(self.nproc),
            "RUN_DIR": str(folder),
        }
        if self.module:
            variables["MODULE"] = self.module
        return Launch([str(LAUNCHER), *self.overrides, *values], job.folder / "console.log", variables)


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each for each in visible.split(",") if each]
    _, gpus = nvidia_smi()
    return [str(index) for index in range(len(gpus))]

"""Compare two arms of one experiment, by default precision: `python -m train.compare +experiment=NAME [options]`.

Also under torchrun (`torchrun --nproc-per-node 2 -m train.compare ...`). For every seed the arms start from the same
initial checkpoint and see the same batches; the report (report.md, report.json, PNG curves) holds loss curves and their
gap, NE, AUC and GAUC on the test split with paired bootstrap intervals, the spread of the first arm over seeds, speed,
peak memory and a verdict. `--assert-equal` demands bitwise equal losses and predictions instead: a check for changes
that should not alter numbers. Exit code 0: within budget (or equal), 1: not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from torch.distributed.elastic.multiprocessing.errors import record

from train import checkpoint, distributed, report
from train.build import build
from train.config import Config, register_schema, split_values, to_config
from train.distributed import World
from train.files import write_json
from train.trainer import Trainer

log = logging.getLogger(__name__)
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@dataclass(frozen=True)
class Arm:
    """A name and the configuration overrides that set it apart."""

    name: str
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`NAME:key=value,key=value`; a bare NAME is a precision."""
        name, colon, overrides = text.partition(":")
        return cls(name, tuple(filter(None, split_values(overrides))) if colon else (f"precision={name}",))


def main(arguments: list[str]) -> int:
    options, overrides = _parse(arguments)
    arms = [Arm.parse(text) for text in options.arms]
    first = _compose(overrides, arms[0])
    world = distributed.start(first.runtime)
    try:
        out = options.out or os.environ.get("RUN_DIR") or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"
        out = Path(str(world.broadcast(str(out)))).absolute()
        _claim(out, arms, overrides, world)
        for seed in options.seeds:
            _train_arms(arms, seed, overrides, out, world)
        passed = _report(arms, options, out) if world.is_first else None
        return 0 if world.broadcast(passed) else 1
    finally:
        distributed.stop()


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m train.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs=2, default=["bf16", "mxfp8"], metavar="NAME[:key=value,...]",
                        help="the baseline and the arm held against it; a bare name is a precision")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=float, default=0.05, help="largest NE gap allowed, in per cent")
    parser.add_argument("--out", type=Path, help="report folder; default RUN_DIR, else runs/compare-<time>")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder of further configurations, as of the training command"
    )
    parser.add_argument("--assert-equal", action="store_true", help="demand bitwise equal losses and predictions")
    options, overrides = parser.parse_known_args(arguments)
    unknown = [text for text in overrides if text.startswith("--")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; configuration overrides are key=value or +experiment=NAME")
    if options.config_dir:
        overrides.append(f"hydra.searchpath=[file://{options.config_dir.absolute()}]")
    if len({Arm.parse(text).name for text in options.arms}) < 2:
        parser.error(
            "the arms need different names, e.g. --arms bf16 mxfp8 or --arms a:model.dropout=0 b:model.dropout=0.1"
        )
    if len(options.seeds) < 2 and not options.assert_equal:
        parser.error("the spread over seeds needs at least two, e.g. --seeds 0 1 2")
    return options, overrides


def _compose(overrides: list[str], arm: Arm, *more: str) -> Config:
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose("train", [*overrides, *arm.overrides, *more]))


def _claim(out: Path, arms: list[Arm], overrides: list[str], world: World) -> None:
    """Finished runs of `out` are taken as they are, so they must be of this comparison; seeds may be added to it."""
    file = out / "compare.json"
    description = {"arms": {arm.name: list(arm.overrides) for arm in arms}, "overrides": overrides}
    if file.exists() and json.loads(file.read_text()) != description:
        raise ValueError(f"{out} holds another comparison (see {file}); choose another --out")
    world.barrier()
    if world.is_first:
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, description)
    world.barrier()


def _train_arms(arms: list[Arm], seed: int, overrides: list[str], out: Path, world: World) -> None:
    initial = out / f"seed-{seed}" / "initial"
    for arm in arms:
        run_dir = out / f"seed-{seed}" / arm.name
        config = _compose(
            overrides,
            arm,
            f"runtime.seed={seed}",
            f"runtime.run_dir='{run_dir}'",
            f"checkpoint.load='{initial}'",
            f"tracking.group={out.name}",
            f"tracking.job_type={arm.name}",
        )
        if not (initial / checkpoint.META).exists():
            job = build(config, world)
            about = {"config": dataclasses.asdict(config), "data_fingerprint": job.source.fingerprint}
            checkpoint.save_weights(initial, job.model, world, about)
            del job
        if not (run_dir / "results.json").exists():  # a comparison that was cut off goes on where it stopped
            Trainer(config, world).run()


def _report(arms: list[Arm], options: argparse.Namespace, out: Path) -> bool:
    runs = {
        arm.name: [report.read_run(out / f"seed-{seed}" / arm.name, seed) for seed in options.seeds] for arm in arms
    }
    baseline, other = arms[0].name, arms[1].name
    if options.assert_equal:
        difference = report.first_difference(runs[baseline], runs[other])
        print(f"{other} differs from {baseline}: {difference}" if difference else f"{baseline} and {other} are equal")
        return not difference
    result: dict[str, Any] = report.compare(baseline, other, runs, budget=options.budget)
    write_json(out / "report.json", result)
    text = report.write(out, result, runs)
    print(text)
    print(f"report: {out / 'report.md'}")
    return bool(result["passed"])


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))

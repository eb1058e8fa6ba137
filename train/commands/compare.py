"""Compare arms of one experiment, by default precision: `python -m train.commands.compare +experiment=NAME [options]`.

Also under torchrun (`torchrun --nproc-per-node 2 -m train.commands.compare ...`), or with `--jobs N`, which trains N
arms and seeds at a time in processes of their own, shared out over the GPUs. For every seed the arms start from the
same initial checkpoint and see the same batches; the report (report.md, report.json, PNG curves; one named after each
further arm if there are several) holds loss curves and their gap, NE, AUC and GAUC on the test split with paired
bootstrap intervals, the spread of the first arm over seeds, speed, peak memory and a verdict. `--assert-equal` demands
bitwise equal losses and predictions instead: a check for changes that should not alter numbers. Exit status: 0 within
budget (or equal), 1 not, 3 unresolved, 4 no verdict, because the baseline has learnt nothing (`verdict.judge`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import torch

    from kernels.mxfp8 import QUANTIZED
    from modules.layers.embedding.tokens import FeatureEmbedding
    from modules.loss import binary_only
    from modules.models import build as build_arch
    from modules.models.ranking import RankingModel
    from modules.precision import apply_recipe
    from train.build import build, planned
    from train.checkpoint import save as checkpoint
    from train.commands import compare_report
    from train.commands.verdict import STATUS, worst
    from train.config.compose import to_config
    from train.config.environment import to_saved
    from train.config.files import composed, searchpath
    from train.config.overrides import split_values
    from train.config.schema import Config
    from train.data.storage.store import ByFirst
    from train.process import distributed, errors, jobs
    from train.process.distributed import World
    from train.process.files import new_folder, write_json
    from train.process.jobs import Job, Launch
    from train.trainer import Trainer

log = logging.getLogger(__name__)


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
    if options.jobs > 1:
        return _in_processes(arguments, arms, options, overrides)
    first = _compose(overrides, arms[0])
    world = distributed.start(first.runtime)
    try:
        if not options.only:
            _check_arms(arms, overrides, world.by_first)
        out = world.by_first(lambda: _claim(_out(options).absolute(), arms, overrides))
        if options.only:
            seed, name = options.only
            _train_arms([arm for arm in arms if arm.name == name], arms[0], int(seed), overrides, out, world)
            return 0
        for seed in (*options.seeds, *options.baseline_seeds):
            chosen = arms if seed in options.seeds else arms[:1]
            _train_arms(chosen, arms[0], seed, overrides, out, world)
        status = _report(arms, options, out, map) if world.is_first else None
        if status and "RANK" in os.environ:
            print(f"The exit code {status} is this verdict; torchrun tells it as processes that failed.", flush=True)
        return world.broadcast(status) or 0
    finally:
        distributed.stop()


def _in_processes(arguments: list[str], arms: list[Arm], options: argparse.Namespace, overrides: list[str]) -> int:
    """Train every arm of every seed in a process of its own, `--jobs` at a time.

    The first arms of all seeds go first: the others wait for the initial checkpoints that these write.
    """
    _check_arms(arms, overrides)
    out = _claim(_out(options).absolute(), arms, overrides)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = visible.split(",")
    slots = [{"CUDA_VISIBLE_DEVICES": gpus[slot * len(gpus) // options.jobs]} for slot in range(options.jobs)]
    command = [sys.executable, "-m", "train.commands.compare", *arguments, "--out", str(out), "--jobs", "1"]
    baseline_seeds = (*options.seeds, *options.baseline_seeds)

    def launch(job: Job) -> Launch:
        seed, arm = job.folder.parent.name.removeprefix("seed-"), job.folder.name
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # as of torchrun; else each would use all cores
        return Launch([*command, "--only", seed, arm], job.folder.with_name(f"{arm}.log"), {"OMP_NUM_THREADS": threads})

    def ended(job: Job) -> None:
        if job.status != "ok":
            raise RuntimeError(job.status)

    waiting = [
        Job(out / f"seed-{seed}" / arm.name)
        for arm in arms
        for seed in (baseline_seeds if arm == arms[0] else options.seeds)
    ]
    jobs.run(jobs.unfinished(waiting), launch, slots, ended)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        return _report(arms, options, out, pool.map)


def _out(options: argparse.Namespace) -> Path:
    named = options.out or os.environ.get("RUN_DIR")
    return Path(named) if named else new_folder(Path(f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}"))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m train.commands.compare", description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", nargs="+", default=["bf16", "mxfp8"], metavar="NAME[:key=value,...]",
                        help="the baseline and the arms held against it; a bare name is a precision")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--baseline-seeds", nargs="+", type=int, default=[],
                        help="further seeds of the baseline alone, for its spread")  # fmt: skip
    parser.add_argument("--budget", type=float, default=0.05, help="largest NE gap allowed, in per cent")
    parser.add_argument("--resamples", type=int, default=1000, help="of the bootstrap intervals")
    parser.add_argument("--jobs", type=int, default=1, help="arms and seeds to train at a time, each in a process")
    parser.add_argument("--only", nargs=2, metavar=("SEED", "ARM"), help=argparse.SUPPRESS)  # what --jobs starts
    parser.add_argument("--out", type=Path, help="report folder; default RUN_DIR, else runs/compare-<time>")
    parser.add_argument(
        "--config-dir", type=Path, help="a folder of further configurations, as of the training command"
    )
    parser.add_argument("--assert-equal", action="store_true", help="demand bitwise equal losses and predictions")
    options, overrides = parser.parse_known_args(arguments)
    # `key=value` after the arms is an override, not an arm: a name would not contain the equals sign.
    overrides += [text for text in options.arms if "=" in text.partition(":")[0]]
    options.arms = [text for text in options.arms if text not in overrides]
    unknown = [text for text in overrides if text.startswith("--")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; configuration overrides are key=value or +experiment=NAME")
    if options.config_dir:
        overrides.append(searchpath(options.config_dir))
    names = {Arm.parse(text).name for text in options.arms}
    if len(names) < len(options.arms) or len(names) < 2:
        parser.error(
            "name two arms or more, of different names, e.g. --arms bf16 mxfp8 or --arms a:model.dropout=0 "
            "b:model.dropout=0.1"
        )
    if options.jobs > 1 and "RANK" in os.environ:
        parser.error("--jobs starts processes itself; leave torchrun out, or --jobs")
    seeds = [*options.seeds, *options.baseline_seeds]
    if len(set(seeds)) < len(seeds):
        parser.error("a seed is named twice; --baseline-seeds are those that --seeds does not name, e.g. 1 2 beside 0")
    if options.assert_equal and options.baseline_seeds:
        parser.error("--assert-equal compares nothing at --baseline-seeds; leave one of them out")
    if len(seeds) < 2 and not options.assert_equal:
        parser.error(
            "the spread over seeds needs two of the baseline, e.g. --seeds 0 1 2 or --seeds 0 --baseline-seeds 1 2"
        )
    return options, overrides


def _compose(overrides: list[str], arm: Arm, *more: str) -> Config:
    return to_config(composed([*overrides, *arm.overrides, *more]))


def _claim(out: Path, arms: list[Arm], overrides: list[str]) -> Path:
    """`out`. Its finished runs are not repeated, so they must belong to this comparison; seeds may be added to it."""
    file = out / "compare.json"
    description = {"arms": {arm.name: list(arm.overrides) for arm in arms}, "overrides": overrides}
    if file.exists():
        if json.loads(file.read_text()) != description:
            raise ValueError(f"{out} holds another comparison (see {file}); choose another --out")
        return out
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, description)
    return out


def _check_arms(arms: list[Arm], overrides: list[str], by_first: ByFirst = lambda prepare: prepare()) -> None:
    """ValueError, before anything trains, when arms cannot start from the same weights or there is no test split."""
    weights: dict[str, dict[str, object]] = {}
    for arm in arms:
        config = _compose(overrides, arm)
        binary_only(config.tasks, "train.commands.compare")
        source, _, spec, _ = planned(config, by_first=by_first)
        if not source.num_requests("test"):
            raise ValueError("arms are compared on the test split, which is empty; e.g. data.split=[0.8,0.1,0.1]")
        with torch.device("meta"):
            embedding = FeatureEmbedding.of(source.spec, config.model, "meta")
            model = RankingModel(embedding, build_arch(config.model, spec))
        weights[arm.name] = {name: tensor.shape for name, tensor in model.state_dict().items()}
        weights[arm.name]["data_fingerprint"] = source.fingerprint
        _check_precision(arm, config, model)
    first = weights[arms[0].name]
    for name, held in weights.items():
        unlike = sorted(key for key in first.keys() | held.keys() if first.get(key) != held.get(key))
        if unlike:
            raise ValueError(
                f"arms {arms[0].name} and {name} cannot start from the same weights: {len(unlike)} differ, e.g. "
                f"{unlike[0]}; compare other models over seeds: launch.sweep --over model=din,dlrm runtime.seed=0,1,2"
            )


def _check_precision(arm: Arm, config: Config, model: RankingModel) -> None:
    """ValueError for an arm that would run in BF16 and show nothing, because no layer gains by its precision."""
    name = config.precision.name
    if name not in QUANTIZED:
        return
    rows = apply_recipe(
        model, name, config.precision.quantize, torch.device(distributed.device_type_of(config.runtime))
    )
    if name not in {row.recipe for row in rows}:
        raise ValueError(
            f"arm {arm.name}: no layer of this model gains by precision={name} on this GPU, so it would run in BF16; "
            f'name what to quantise, e.g. "{arm.name}:precision={name},precision.quantize=[arch.*]"'
        )


def _train_arms(arms: list[Arm], first: Arm, seed: int, overrides: list[str], out: Path, world: World) -> None:
    """Train `arms` at one seed. The process that trains the `first` arm writes the weights that all arms start from."""
    initial = out / f"seed-{seed}" / "initial"
    for arm in arms:
        run_dir = out / f"seed-{seed}" / arm.name
        config = _compose(
            overrides,
            arm,
            f"runtime.seed={seed}",
            f"runtime.run_dir='{run_dir}'",
            f"checkpoint.load='{initial}'",
            f"tracking.group='{out.name}'",
            f"tracking.name='{arm.name} seed {seed}'",
        )
        if not (initial / checkpoint.META).exists() and arm == first:
            job = build(config, world)
            about = {"config": to_saved(config), "data_fingerprint": job.source.fingerprint}
            checkpoint.save_weights(initial, job.model, world, about)
            del job
            gc.collect()
        _wait_for(initial / checkpoint.META, config.runtime.collective_timeout)
        if not (run_dir / "results.json").exists():  # unless an earlier start of this comparison finished it
            _train(config, world, None if arm == first else run_dir.with_name(first.name))
            gc.collect()  # models have reference cycles, and would count in the next run's peak memory


def _train(config: Config, world: World, baseline: Path | None) -> None:
    """`baseline`: the run of the first arm at the same seed, to which the loss's gap is logged."""
    trainer = Trainer(config, world)
    if baseline is not None and config.tracking.wandb != "disabled":
        trainer.tracker.compare_with(baseline)
    trainer.run()


def _wait_for(file: Path, seconds: float) -> None:
    """Wait for a file that another process writes once it has built its model, see `--jobs`."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(
                f"{file} was not written within {seconds:g} s (runtime.collective_timeout); see the first arm's log"
            )
        time.sleep(0.1)


def _report(arms: list[Arm], options: argparse.Namespace, out: Path, mapped: Callable[..., Iterable[Any]]) -> int:
    """The exit status."""
    baseline, equal = arms[0].name, True
    seeds = {arm.name: options.seeds for arm in arms} | {baseline: [*options.seeds, *options.baseline_seeds]}
    runs = {arm: [compare_report.read_run(out / f"seed-{seed}" / arm, seed) for seed in seeds[arm]] for arm in seeds}
    others = [arm.name for arm in arms[1:]]
    if options.assert_equal:
        for other in others:
            difference = compare_report.first_difference(runs[baseline][: len(runs[other])], runs[other])
            print(
                f"{other} differs from {baseline}: {difference}" if difference else f"{baseline} and {other} are equal"
            )
            equal &= not difference
        return 0 if equal else 1
    pairs = [{name: runs[name] for name in (baseline, other)} for other in others]
    judge = partial(compare_report.compare, budget=options.budget, resamples=options.resamples, mapped=mapped)
    with ThreadPoolExecutor() as threads:  # the slow part runs in the processes of `mapped`, if there are any
        results = list(threads.map(judge, repeat(baseline), others, pairs))
    for other, pair, result in zip(others, pairs, results, strict=True):
        stem = "report" if len(arms) == 2 else f"report-{other}"
        write_json(out / f"{stem}.json", result)
        print(compare_report.write(out, stem, result, pair))
        compare_report.track(out, stem, result, pair)
        print(f"report: {out / stem}.md")
    return STATUS[worst([result["verdict"] for result in results])]


if __name__ == "__main__":
    errors.run(main)

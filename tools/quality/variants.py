"""Models by their defaults on several logs, InterFormer without its parts, and LightGBM beside: docs/recipe.md's table.

    python -m tools.quality.variants --out runs/variants --parallel 24 --seconds 290 [--logs shop news] [--store]

Logs are generated first where they are missing (`tools.datasets.business_logs`). Validation decides; the test split is
in the results beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tools.quality import run
from tools.quality.page import BASE, KEPT_METRICS, STORED, compared, tested
from tools.quality.reachable import reachable
from train.commands import baseline
from train.config.schema import Config, EventsConfig

GENERATED = {"shop": 60_000, "video": 60_000, "news": 60_000, "shop_200k": 200_000}  # impressions of kinds of business
FOLDER = "prepared/variants/{}"
LOGS = {log: (f"data={log.partition('_')[0]}_log", f"data.root={FOLDER.format(log)}") for log in GENERATED}
LOGS["ids"] = ("data=movielens_ids",)
KEPT = ("step", "best_step", "seconds", "valid", "test")
ABOUT = ("device", "commit")

NO_STATISTICS = "no statistics"
NO_PLAIN_HEAD = {"no plain head": ("model.plain_head=false",)}
OF_MANY = {  # what `train.process.length` chooses for many requests
    "settings of large logs": (
        *("optimizer.lr=0.001", "optimizer.sparse_lr=0.02", "model.dropout=0"),
        "model.plain_head=false",
    )
}
ARMS: dict[str, dict[str, tuple[str, ...]]] = {
    "interformer": {
        BASE: (),
        **NO_PLAIN_HEAD,
        NO_STATISTICS: ("data.statistics=none",),
    },
    "kunlun": {BASE: (), **NO_PLAIN_HEAD, **OF_MANY},
    "gem": {BASE: (), **OF_MANY},
    "din": {BASE: ()},
    "dcnv2": {BASE: ()},
    "lightgbm": {BASE: ("model=din", "tracking.tags=[lightgbm]")},
}
Job = dict[str, Any]


def train(config: Config, again: object = None) -> dict[str, Any]:
    """Metrics of one arm, as of `tools.quality.run`."""
    from train.process import distributed
    from train.trainer import Trainer

    if "lightgbm" in config.tracking.tags:
        results = baseline.train(config, baseline.parse([]))
        if isinstance(config.data, EventsConfig) and config.data.root.startswith("prepared"):
            results["reachable"] = reachable(Path(config.runtime.run_dir))
        return {key: results[key] for key in (*KEPT, "reachable") if key in results}
    world = distributed.start(config.runtime)
    try:
        results = Trainer(config, world).run()
    finally:
        distributed.stop()
    return {key: results[key] for key in KEPT if key in results}


def jobs(logs: list[str], models: list[str], arms: list[str], seeds: list[int], extra: list[str]) -> list[Job]:
    """Those of the first seed first, the arms in their order."""
    names = list(dict.fromkeys(arm for model in models for arm in ARMS[model] if not arms or arm in arms))
    found = [
        (log, model, arm, seed)
        for seed in seeds
        for arm in names
        for model in models
        for log in logs
        if arm in ARMS[model] and (log in GENERATED or arm != NO_STATISTICS)
    ]
    return [
        {
            "name": f"{log}/{model}/{arm}/{seed}",
            "overrides": [*LOGS[log], *_overrides(model, arm), f"runtime.seed={seed}", *extra],
            "by": "variants",
        }
        for log, model, arm, seed in found
    ]


def _overrides(model: str, arm: str) -> list[str]:
    return [*([] if model == "lightgbm" else [f"model={model}"]), *ARMS[model][arm]]


def dumped(found: run.Results, before: dict[str, Any]) -> str:
    """A line a run; those of `before` that were not run again stay."""
    values = {key: {*before["about"][key].split(", "), *(each[key][:40] for each in found.values())} for key in ABOUT}
    about = {key: ", ".join(sorted(values[key] - {""})) for key in ABOUT}
    lines = [json.dumps(each) for each in before["runs"] if each["name"] not in found]
    for each in found.values():
        numbers = {
            split: {key: round(v, 5) for key, v in each[split].items() if key.split("/")[1] in KEPT_METRICS}
            for split in ("valid", "test")
        }
        kept = {key: each[key] for key in ("name", "step", "best_step", "reachable") if key in each}
        lines.append(json.dumps(kept | {"seconds": round(each["seconds"], 1)} | numbers))
    return '{"about": ' + json.dumps(about) + ', "runs": [\n' + ",\n".join(lines) + "\n]}\n"


def prepare(log: str) -> None:
    """Generate a log unless it is there, and prepare its data."""
    from tools.datasets import business_logs
    from train.data import build_source

    folder = FOLDER.format(log)
    if log in GENERATED and not Path(folder, "items.parquet").exists():
        business_logs.main([log.partition("_")[0], "--impressions", str(GENERATED[log]), "--to", folder])
    build_source(run.configuration([*LOGS[log]]).data)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.variants", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--models", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--arms", nargs="+", default=[], help="names of arms; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    parser.add_argument("--store", type=Path, nargs="?", const=STORED / "small_logs.json", help="add to this file")
    extra = [each for each in arguments if "=" in each and not each.startswith("--")]
    options = parser.parse_args([each for each in arguments if each not in extra])
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(prepare, options.logs))
    planned = jobs(options.logs, options.models, options.arms, options.seeds, extra)
    whole = run.run(lambda _: planned, options.out, parallel=options.parallel, seconds=options.seconds)
    found = run.results(options.out)
    print("\n".join([*compared(list(found.values())), "", *tested(list(found.values()))]))
    if options.store:
        empty = {"about": dict.fromkeys(ABOUT, ""), "runs": []}
        before = json.loads(options.store.read_text()) if options.store.exists() else empty
        options.store.write_text(dumped(found, before))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

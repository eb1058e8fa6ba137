"""NE against operations an example on a stream on which size pays: what docs/recipe.md#which-size shows.

    python -m tools.quality.scaling train --out runs/scaling --parallel 10 [--seeds 0 1] [--seconds 280] [key=value ...]
    python -m tools.quality.scaling fit --out runs/scaling

`train` gives every size of every model the same examples once, in the same order at the same rates, with several
trainings in a process each at a time; started again, it trains what has no result yet. `fit` needs no GPU: it counts
the operations, fits the lines of `launch.scaling_law` and writes docs/quality/scaling_law.json and .png. Labels are of
`data.signal=network`, so the NE of the logits that they were drawn from is known, too: no model can do better.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.scaling_law import Run, fit, lines_of, table
from modules.costs.flops import count_flops
from modules.models import build as build_arch
from tools.quality import run
from train.data import build_source
from train.data.synthetic import SyntheticSource
from train.metrics import log_loss, normalized_entropy
from train.metrics.throughput import TRAINING_FLOPS
from train.process.files import write_json

STORED = Path(__file__).resolve().parents[2] / "docs" / "quality"
STEPS, REQUESTS, CANDIDATES = 1500, 1024, 4

COMMON = (
    "data=synthetic",
    "data.signal=network",
    "data.tasks=[click]",
    "data.num_users=1000",
    "data.num_items=1000",
    "data.num_categories=32",
    f"data.candidates={CANDIDATES}",
    "data.max_history=24",  # and all are as long: batches of one shape
    "data.mean_history=25",
    "data.history_sigma=0",
    f"data.num_requests={STEPS * REQUESTS}",
    "data.eval_requests=32768",
    f"data.batch_size={REQUESTS}",
    "data.eval_batch_size=8192",
    "data.num_workers=1",
    "runtime.cuda_graphs=true",
    "optimizer.sparse_lr=0.1",
    "optimizer.warmup_steps=100",
    "model.table_std=0.05",
)
"""Of all runs: one epoch over a stream that never repeats, one validation at its end."""


def _rate(dim: int) -> str:
    """The dense learning rate falls with the root of the width: .004 at 16, .002 at 64, .0014 at 128."""
    return f"optimizer.lr={0.016 / dim**0.5:.2g}"


def _interformer(dim: int, layers: int, heads: int, tokens: int, hidden: int) -> tuple[str, ...]:
    return (
        _rate(dim),
        f"model.dim={dim}",
        f"model.num_layers={layers}",
        f"model.num_heads={heads}",
        f"model.num_cls={tokens}",
        f"model.num_pma={tokens}",
        f"model.interaction_hidden=[{hidden}]",
        f"model.head_hidden=[{hidden},{hidden // 2}]",
    )


def _kunlun(dim: int, layers: int, heads: int, tokens: int, hidden: int) -> tuple[str, ...]:
    return (
        _rate(dim),
        f"model.dim={dim}",
        f"model.num_layers={layers}",
        f"model.num_heads={heads}",
        f"model.num_tokens={tokens}",
        f"model.num_seeds={4 * tokens}",
        f"model.wukong.num_fmb={tokens}",
        f"model.wukong.num_lcb={tokens}",
        f"model.pffn_hidden={max(32, dim)}",
        f"model.interaction_hidden=[{hidden}]",
        f"model.head_hidden=[{hidden},{hidden // 2}]",
    )


def _wukong(dim: int, layers: int, tokens: int, hidden: int) -> tuple[str, ...]:
    return (
        _rate(dim),
        f"model.dim={dim}",
        f"model.num_layers={layers}",
        f"model.wukong.num_fmb={tokens}",
        f"model.wukong.num_lcb={tokens}",
        f"model.wukong.rank={min(24, tokens)}",
        f"model.hidden=[{hidden}]",
        f"model.head_hidden=[{hidden},{hidden // 2}]",
    )


SIZES: dict[str, dict[str, tuple[str, ...]]] = {
    "interformer": {
        "XS": _interformer(16, 1, 1, 1, 32),
        "S": _interformer(16, 2, 1, 2, 64),
        "M": _interformer(32, 2, 2, 4, 128),
        "L": _interformer(64, 2, 4, 4, 256),
        "XL": _interformer(128, 2, 4, 4, 512),
        "XXL": _interformer(192, 2, 6, 4, 768),
    },
    "kunlun": {
        "XS": _kunlun(16, 2, 1, 1, 32),
        "S": _kunlun(16, 4, 1, 4, 96),
        "M": _kunlun(32, 2, 2, 4, 128),
        "L": _kunlun(64, 2, 4, 4, 256),
        "XL": _kunlun(128, 2, 4, 8, 512),
        "XXL": _kunlun(192, 2, 6, 8, 768),
    },
    "wukong": {
        "XS": _wukong(16, 1, 2, 32),
        "S": _wukong(16, 2, 4, 64),
        "M": _wukong(32, 2, 8, 128),
        "L": _wukong(64, 2, 8, 256),
        "XL": _wukong(128, 3, 12, 512),
        "XXL": _wukong(192, 4, 16, 768),
    },
}


def jobs(seeds: Sequence[int], models: Sequence[str], extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Of `tools.quality.run`, the largest sizes first: they take longest."""
    order = [(seed, size, model) for seed in seeds for size in reversed(SIZES["wukong"]) for model in models]
    return [
        {
            "name": f"{model}/{size}/{seed}",
            "overrides": [*COMMON, f"model={model}", *SIZES[model][size], f"runtime.seed={seed}", *extra],
        }
        for seed, size, model in order
    ]


def operations(overrides: Sequence[str]) -> float:
    """FLOPs of training an example, forward and backward, at the true lengths."""
    config = run.configuration(list(overrides))
    source = build_source(config.data)
    arch = build_arch(config.model, source.spec)
    events = sum(event.max_length for event in source.spec.histories)  # of every request
    of_request = count_flops(arch, source.spec, config.model.dim)(1, CANDIDATES, events, events**2)
    return TRAINING_FLOPS * of_request / CANDIDATES


def floor(overrides: Sequence[str]) -> float:
    """NE on the validation split of the logits that its labels were drawn from."""
    source = build_source(run.configuration(list(overrides)).data)
    assert isinstance(source, SyntheticSource)
    losses = []
    for requests in np.array_split(np.arange(source.num_requests("valid")), 16):
        logits = torch.from_numpy(source.bayes_logits("valid", requests))
        losses.append(log_loss(logits, source.batch("valid", requests).labels).mean().item())
    return normalized_entropy(float(np.mean(losses)), source.label_rates()["click"])


def measured(results: run.Results) -> list[Run]:
    """The finished runs, as `launch.scaling_law` takes them."""
    counted: dict[str, float] = {}
    runs = []
    for name, result in sorted(results.items()):
        size, _, _seed = name.rpartition("/")
        if size not in counted:
            counted[size] = operations(result["overrides"])
        runs.append(Run(name, size.partition("/")[0], counted[size], result["valid"]["click/ne"]))
    return runs


def sizes_table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each size, for each model its operations and its mean NE over seeds."""
    models = list(dict.fromkeys(each.model for each in runs))
    lines = [
        "| size | " + " | ".join(f"{model}, MFLOP | NE" for model in models) + " |",
        "|---" * (1 + 2 * len(models)) + "|",
    ]
    for size in SIZES["wukong"]:
        cells = [size]
        for model in models:
            of_size = [each for each in runs if each.folder.startswith(f"{model}/{size}/")]
            flops, ne = (
                (f"{of_size[0].flops / 1e6:.3g}", f"{np.mean([each.ne for each in of_size]):.4f}") if of_size else "  "
            )
            cells += [flops, ne]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(results: run.Results) -> str:
    """Fit, and write docs/quality/scaling_law.json and .png; the tables of lines and of sizes."""
    from train.record.plots import plot_scaling_law  # imports matplotlib, which training does without

    by_model: dict[str, list[Run]] = defaultdict(list)
    for each in measured(results):
        by_model[each.model].append(each)
    laws = {model: fit(runs) for model, runs in by_model.items()}
    first = next(iter(results.values()))
    content = {
        "about": {key: sorted({result[key] for result in results.values()}) for key in ("device", "commit")},
        "overrides": list(COMMON),
        "floor": floor(first["overrides"]),
        "laws": {model: law and asdict(law) for model, law in laws.items()},
        "runs": [asdict(each) for runs in by_model.values() for each in runs],
    }
    write_json(STORED / "scaling_law.json", content)
    points = {model: [(each.flops, each.ne) for each in runs] for model, runs in by_model.items()}
    plot_scaling_law(points, lines_of(laws), STORED / "scaling_law.png")
    return table(laws) + "\n" + sizes_table([each for runs in by_model.values() for each in runs])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.scaling", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["train", "fit"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no training later than this after the start")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration of all trainings")
    options = parser.parse_intermixed_args(arguments)
    if options.what == "fit":
        print(write(run.results(options.out)))
        return 0
    planned = jobs(options.seeds, options.models, options.overrides)
    return 0 if run.run(lambda _: planned, options.out, parallel=options.parallel, seconds=options.seconds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

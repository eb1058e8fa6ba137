"""Figures of docs/parallel.md that need no GPU: `python -m tools.parallel docs/performance/parallel_cpu.json`.

*balance*: the largest cost of a rank over the mean, of requests in order and as `parallel.balance` deals them. Lengths
are those of the synthetic stream, log-normal for each event type, costs the FLOPs of the architecture. *fit*: what
`doctor` counts for a rank. *dense_parameters*: of the model of two_gpus_h200.json. *waiting*: the shares of looked-up
rows, and of different ones, that the batch before has, too, whose update they wait for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modules.costs.flops import count_flops
from modules.models import build as build_arch
from train.commands.fit import fit
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.data import build_source
from train.data.loading.dealing import Cost, Dealer

MODEL = "+experiment=synthetic_h200"
RANKS, REQUESTS, BATCHES = 8, 512, 20
BLOCKS = (1, 8, 32)
LENGTHS = (
    (),
    ("data.max_history=4096", "data.history_sigma=0.5"),
    ("data.max_history=4096",),
    ("data.max_history=4096", "data.history_sigma=1.5"),
)
LAYOUTS = (
    *(MODEL, "model.dim=512", "model.num_heads=8", "model.num_layers=2", "model.feed_forward=moe"),
    *("model.moe.num_experts=16", "model.moe.expert_dim=2048"),
)


def configured(*overrides: str) -> Config:
    return to_config(composed(overrides))


def cost_of(config: Config) -> Cost:
    """Of a request with one candidate: FLOPs of a forward, as in a training."""
    spec = build_source(config.data).spec
    flops = count_flops(build_arch(config.model, spec), spec, config.model.dim)
    fixed = flops(1, 1, 0, 0)
    return Cost(fixed, flops(1, 1, 1, 0) - fixed, flops(1, 1, 0, 1) - fixed)


def balance(*overrides: str) -> dict[str, Any]:
    """Largest over mean cost of a rank, before and after, as means over batches."""
    config = configured(MODEL, f"data.num_requests={RANKS * REQUESTS * BATCHES}", *overrides)
    cost, source = cost_of(config), build_source(config.data)
    batches = np.arange(RANKS * REQUESTS * BATCHES).reshape(BATCHES, -1)
    lengths = [source.lengths("train", requests) for requests in batches]
    row: dict[str, Any] = {
        "overrides": list(overrides),
        "mean_length": float(np.mean(lengths)),
        "longest": int(np.max(lengths)),
    }
    for block in BLOCKS:
        dealer = Dealer(cost, RANKS, block)
        for each in lengths:
            dealer.share(each, 0)
        found = dealer.compute()
        row["in_order"], row[f"blocks_of_{block}"] = 1 + found["imbalance_in_order"], 1 + found["imbalance"]
    return row


def waiting(ranks: int) -> dict[str, Any]:
    """Of the third global batch and the one before it."""
    config = configured(MODEL)
    source, size = build_source(config.data), config.data.batch_size * ranks
    table_of, batches = dict(source.spec.lookups()), []
    for begin in (size, 2 * size):
        ids: dict[str, list[np.ndarray]] = {}
        for part in np.arange(begin, begin + size).reshape(ranks, -1):
            for feature, values in source.batch("train", part).lookup.to_dict().items():
                ids.setdefault(table_of[feature], []).append(values.values().numpy())
        batches.append({table: np.concatenate(parts) for table, parts in ids.items()})
    before, now = batches
    different = {table: np.unique(rows) for table, rows in now.items()}

    def share(ids: dict[str, np.ndarray]) -> float:
        both = sum(int(np.isin(rows, before[table]).sum()) for table, rows in ids.items())
        return both / sum(map(len, ids.values()))

    return {"ranks": ranks, "rows": share(now), "different_rows": share(different)}


def dense_parameters(*overrides: str) -> int:
    config = configured(*overrides)
    with torch.device("meta"):
        arch = build_arch(config.model, build_source(config.data).spec)
    return sum(parameter.numel() for parameter in arch.parameters())


def main(file: Path) -> None:
    of_one = fit(configured(MODEL), ranks=1, node_ranks=1, gpu_gib=140)
    results = {
        "command": "python -m tools.parallel docs/performance/parallel_cpu.json",
        "torch": torch.__version__,
        "balance": {
            "method": f"{RANKS} ranks of {REQUESTS} requests, means over {BATCHES} global batches; costs in FLOPs",
            "experiment": MODEL,
            "rows": [balance(*overrides) for overrides in LENGTHS],
        },
        "fit": {"experiment": MODEL, "ranks": 1, "bytes": of_one.parts, "total": of_one.total},
        "waiting": {"experiment": MODEL, "rows": [waiting(ranks) for ranks in (1, 2, 8)]},
        "dense_parameters": {"overrides": LAYOUTS, "parameters": dense_parameters(*LAYOUTS)},
    }
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

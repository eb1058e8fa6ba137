"""What is tried against memorised ids and in InterFormer, as arms of one screen over several logs.

    python -m tools.quality.variants --out runs/variants --parallel 15 --seconds 430 [--logs shop news] [--store]

Logs are generated first where they are missing (`tools.datasets.business_logs`). Validation decides; the test split is
in the results beside it. What no key of the configuration says is patched in here, by words of `tracking.tags`:
`restart` begins the tables anew with each epoch; `eps=X` adds X to the root of Adagrad's sums, so that rows with few
gradients move little; `quiet=X` is the root mean square below which `modules.norms.row_norm` takes a row for unlearned;
`tokens` and `units` give InterFormer's head the candidate's own tokens, and DIN's units.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modules import norms
from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.embedding import Tokens
from modules.mlp import TaskHeads
from modules.models.baselines import ActivationUnit
from modules.models.interformer.model import InterFormer
from tools.quality import run
from tools.quality.page import BASE, KEPT_METRICS, STORED, compared
from tools.quality.reachable import reachable
from train.commands import baseline
from train.config.schema import Config, EventsConfig

GENERATED = ("shop", "video", "news")
LOGS = {kind: (f"data={kind}_log",) for kind in GENERATED} | {
    "ids": ("data=movielens_ids",),
    "features": ("data=movielens",),
}
TABLES = {"ids": ("userId", "movieId"), "features": ("user", "movie")}  # of users and items; of others user and item
KEPT = ("step", "best_step", "seconds", "valid", "test")


def epochs(number: int, *overrides: str) -> tuple[str, ...]:
    return ("data.batch_size=128", f"runtime.epochs={number}", "runtime.evals_per_epoch=2", *overrides)


COMMON = {
    BASE: epochs(2),
    "one epoch": epochs(1),
    "dropout": epochs(2, "model.dropout=0.2"),
    "lr 0.002, dropout": epochs(2, "optimizer.lr=0.002", "model.dropout=0.2"),
    "both dropouts": epochs(2, "model.dropout=0.2", "model.embedding_dropout=0.2"),
    "as it is": (),
    "eps 1e-4": epochs(2, "tracking.tags=['eps=1e-4']"),
    "eps 1e-3": epochs(2, "tracking.tags=['eps=1e-3']"),
    "ema 0.99": epochs(2, "optimizer.ema_decay=0.99"),
    "id dropout": epochs(2, "+data.id_dropout={USER: 0.1, ITEM: 0.1}"),
    "sparse_lr 0.005": epochs(2, "optimizer.sparse_lr=0.005"),
    "sparse_lr 0.005, dropout": epochs(2, "optimizer.sparse_lr=0.005", "model.dropout=0.2"),
    "four epochs": epochs(4),
    "restart": epochs(2, "tracking.tags=[restart]"),
    "restart, four epochs": epochs(4, "tracking.tags=[restart]"),
}
OF_INTERFORMER = COMMON | {
    "quiet 0.5": epochs(2, "tracking.tags=['quiet=0.5']"),
    "quiet 0.5, dropout": epochs(2, "tracking.tags=['quiet=0.5']", "model.dropout=0.2"),
    "quiet 0.5, dropout, lr 0.002": epochs(2, "tracking.tags=['quiet=0.5']", "model.dropout=0.2", "optimizer.lr=0.002"),
    "quiet 0.25": epochs(2, "tracking.tags=['quiet=0.25']"),
    "quiet 0.5, four epochs": epochs(4, "tracking.tags=['quiet=0.5']"),
    "units": epochs(2, "tracking.tags=[units]"),
    "tokens": epochs(2, "tracking.tags=[tokens]"),
    "units, both dropouts": epochs(2, "tracking.tags=[units]", "model.dropout=0.2", "model.embedding_dropout=0.2"),
    "embedding dropout": epochs(2, "model.embedding_dropout=0.2"),
    "min_count 3": epochs(2, "data.min_count=3"),
    "sparse_lr 0.05": epochs(2, "optimizer.sparse_lr=0.05"),
    "table_std null": epochs(2, "model.table_std=null"),
    "one layer": epochs(2, "model.num_layers=1"),
    "lr 0.002": epochs(2, "optimizer.lr=0.002"),
}
OF_OTHERS = COMMON | {"table_std 0.01": epochs(2, "model.table_std=0.01")}
ARMS = {
    "lightgbm": {BASE: ("model=din", "tracking.tags=[lightgbm]")},
    "interformer": OF_INTERFORMER,
    "din": OF_OTHERS,
    "dcnv2": OF_OTHERS,
}


Job = dict[str, Any]


class Heads(nn.Module):
    """Task heads that read `more` [C, width] beside what they are given."""

    def __init__(self, heads: TaskHeads) -> None:
        super().__init__()
        self.heads = heads
        self.more: Tensor | None = None

    def forward(self, candidate: Tensor, request: Tensor, rows: CandidateRows) -> Tensor:
        assert self.more is not None
        return self.heads(torch.cat([candidate, self.more], dim=1), request, rows)


class Extended(InterFormer):
    words: tuple[str, ...] = ()

    def __init__(self, spec: FeatureSpec, config: InterFormer.Config) -> None:
        super().__init__(spec, config)
        self.events = spec.histories if "units" in self.words else ()
        self.units = nn.ModuleList(ActivationUnit(spec, event, config.dim, [64]) for event in self.events)
        width = spec.num_candidate_tokens * ("tokens" in self.words) + sum(len(event.fields) for event in self.events)
        own = (config.num_cls + config.num_pma + width) * config.dim
        request = (config.num_cls + config.num_recent) * config.dim
        self.heads = Heads(TaskHeads(own, config.head_hidden, spec.num_outputs, config.dropout, request))

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        rows = CandidateRows.of(batch)
        more = [norms.row_norm(tokens.candidate).flatten(1)] if "tokens" in self.words else []
        for event, unit in zip(self.events, self.units, strict=True):
            more.append(unit(tokens.candidate, tokens.histories[event.name], rows))
        self.heads.more = torch.cat(more, dim=1)
        return super().forward(tokens, batch)


@contextmanager
def patched(config: Config) -> Iterator[type]:
    """The trainer of a configuration, while the patches of its tags are in place."""
    from train import build
    from train.optim import sparse
    from train.trainer import Trainer

    words = config.tracking.tags
    arch, optimizer = build.build_arch, sparse.apply_optimizer_in_backward
    head = tuple(word for word in words if word in ("tokens", "units"))
    numbers = {key: float(value) for key, _, value in (word.partition("=") for word in words) if value}
    eps, quiet = numbers.get("eps", 0.0), numbers.get("quiet", norms.QUIET)

    def make(chosen: Any, spec: FeatureSpec) -> nn.Module:
        return type("Extended", (Extended,), {"words": head})(spec, chosen) if head else arch(chosen, spec)

    def give(kind: Any, parameters: Any, settings: dict[str, Any]) -> None:
        optimizer(kind, parameters, settings | ({"eps": eps} if eps else {}))

    class Restarting(Trainer):
        def _train_epoch(self) -> None:
            if self.progress.epoch and not self.progress.consumed:
                begin_anew(self.model.fused_optimizer, self.config.model.table_std)
            super()._train_epoch()

    with (
        patch.object(build, "build_arch", make),
        patch.object(sparse, "apply_optimizer_in_backward", give),
        patch.object(norms, "QUIET", quiet),
    ):
        yield Restarting if "restart" in words else Trainer


@torch.no_grad()
def begin_anew(optimizer: Any, std: float | None) -> None:
    """First values for all rows of all tables, and no moments."""
    for weight in optimizer.params.values():
        for shard in weight.local_shards():
            shard.tensor.detach().normal_(std=std or 1 / math.sqrt(shard.tensor.shape[1]))
        for state in optimizer.state[weight].values():
            for shard in state.local_shards():
                shard.tensor.detach().zero_()


def train(config: Config, again: object = None) -> dict[str, Any]:
    """Metrics of one arm, as of `tools.quality.run`."""
    from train.process import distributed

    if "lightgbm" in config.tracking.tags:
        results = baseline.train(config, baseline.parse([]))
        if isinstance(config.data, EventsConfig) and config.data.root.startswith("prepared"):
            results["reachable"] = reachable(Path(config.runtime.run_dir))
        return {key: results[key] for key in (*KEPT, "reachable") if key in results}
    with patched(config) as kind:
        world = distributed.start(config.runtime)
        try:
            results = kind(config, world).run()
        finally:
            distributed.stop()
    return {key: results[key] for key in KEPT if key in results}


def jobs(logs: list[str], models: list[str], arms: list[str], seeds: list[int], extra: list[str]) -> list[Job]:
    """Those of the first seed first, the arms in their order."""
    names = list(dict.fromkeys(arm for model in models for arm in ARMS[model] if not arms or arm in arms))
    return [
        {
            "name": f"{log}/{model}/{arm}/{seed}",
            "overrides": [*LOGS[log], *_overrides(log, model, arm), f"runtime.seed={seed}", *extra],
            "by": "variants",
        }
        for seed in seeds
        for arm in names
        for model in models
        for log in logs
        if arm in ARMS[model]
    ]


def _overrides(log: str, model: str, arm: str) -> list[str]:
    user, item = TABLES.get(log, ("user", "item"))
    own = [] if model == "lightgbm" else [f"model={model}"]
    return [*own, *(each.replace("USER", user).replace("ITEM", item) for each in ARMS[model][arm])]


def dumped(found: run.Results) -> str:
    """A line a run."""
    about = {key: ", ".join(sorted({each[key][:40] for each in found.values()})) for key in ("device", "commit")}
    lines = []
    for each in found.values():
        numbers = {
            split: {key: round(v, 5) for key, v in each[split].items() if key.split("/")[1] in KEPT_METRICS}
            for split in ("valid", "test")
        }
        kept = {key: each[key] for key in ("name", "step", "best_step", "reachable") if key in each}
        lines.append(json.dumps(kept | {"seconds": round(each["seconds"], 1)} | numbers))
    return '{"about": ' + json.dumps(about) + ', "runs": [\n' + ",\n".join(lines) + "\n]}\n"


def generate(kind: str) -> None:
    from tools.datasets import business_logs

    if not Path("prepared", f"{kind}_log", "items.parquet").exists():
        business_logs.main([kind])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.variants", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--models", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--arms", nargs="+", default=[], help="names of arms; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    parser.add_argument("--store", action="store_true", help="write docs/quality/variants.json")
    options, extra = parser.parse_known_args(arguments)
    with ProcessPoolExecutor() as pool:
        list(pool.map(generate, [log for log in options.logs if log in GENERATED]))
    planned = jobs(options.logs, options.models, options.arms, options.seeds, extra)
    whole = run.run(lambda _: planned, options.out, parallel=options.parallel, seconds=options.seconds)
    found = run.results(options.out)
    print("\n".join(compared(list(found.values()))))
    if options.store:
        (STORED / "variants.json").write_text(dumped(found))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What is tried against memorised ids and in InterFormer, as arms of one screen over several logs.

    python -m tools.quality.variants --out runs/variants --parallel 24 --seconds 290 [--logs shop news] [--store]

Logs are generated first where they are missing (`tools.datasets.business_logs`). Validation decides; the test split is
in the results beside it. What no key of the configuration says is patched in here, by words of `tracking.tags`:
`restart` begins the tables anew with each epoch; `quiet=X` is the root mean square below which
`modules.layers.norms.row_norm` takes a row for unlearned; `flat` and `units` give InterFormer's head all tokens as they
end, and DIN's units; `grouped` makes a token of each group of statistics, `bent` makes tokens of numbers by a small
network.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modules.batch import FeatureSpec, RequestBatch, VectorFeature
from modules.broadcast import CandidateRows
from modules.layers import norms
from modules.layers.embedding import tokens as embedding
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.mlp import MLP, TaskHeads
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


FASTER = ("optimizer.lr=0.002", "model.dropout=0.2")
NO_STATISTICS = "no statistics"
TOKENS = "tracking.tags=[grouped,bent]"
COMMON = {
    BASE: epochs(2),
    "lr 0.002, dropout": epochs(2, *FASTER),
    "dropout": epochs(2, "model.dropout=0.2"),
    "as it is": (),
    "as it is, dropout": ("model.dropout=0.2",),
    "lr 0.002, dropout, sparse_lr 0.005": epochs(2, *FASTER, "optimizer.sparse_lr=0.005"),
    "lr 0.002, dropout, sparse_lr 0.001": epochs(2, *FASTER, "optimizer.sparse_lr=0.001"),
    "grouped, bent": epochs(2, TOKENS),
    "grouped, bent, lr 0.002, dropout": epochs(2, *FASTER, TOKENS),
    "bent": epochs(2, "tracking.tags=[bent]"),
    "lr 0.002, both dropouts": epochs(2, *FASTER, "model.embedding_dropout=0.2"),
    "history dropout": epochs(2, "data.history_dropout=0.2"),
    "ema 0.99": epochs(2, "optimizer.ema_decay=0.99"),
    "one epoch": epochs(1),
    "restart": epochs(2, "tracking.tags=[restart]"),
    "id dropout": epochs(2, "+data.id_dropout={USER: 0.1, ITEM: 0.1}"),
}
OF_INTERFORMER = {
    **dict(list(COMMON.items())[:5]),
    NO_STATISTICS: epochs(2, "data.statistics=none"),
    "quiet 0.5, lr 0.002, dropout": epochs(2, *FASTER, "tracking.tags=['quiet=0.5']"),
    "flat, lr 0.002, dropout": epochs(2, *FASTER, "tracking.tags=[flat]"),
    "units, lr 0.002, dropout": epochs(2, *FASTER, "tracking.tags=[units]"),
    **COMMON,
    "quiet 0.5": epochs(2, "tracking.tags=['quiet=0.5']"),
}
OF_OTHERS = COMMON | {"table_std 0.01, lr 0.002, dropout": epochs(2, *FASTER, "model.table_std=0.01")}
ARMS = {
    "interformer": OF_INTERFORMER,
    "din": OF_OTHERS,
    "dcnv2": OF_OTHERS,
    "lightgbm": {BASE: ("model=din", "tracking.tags=[lightgbm]")},
}
OF_STATISTICS = re.compile(f"{NO_STATISTICS}|grouped|bent")  # arms of logs that have them
FIRST = (BASE, "lr 0.002, dropout", "dropout", NO_STATISTICS)  # arms whose seeds do not wait for other arms


Job = dict[str, Any]


class Heads(nn.Module):
    """Task heads that read `more` [C, width each] beside what they are given."""

    def __init__(self, heads: TaskHeads) -> None:
        super().__init__()
        self.heads = heads
        self.more: list[Tensor] = []

    def forward(self, candidate: Tensor, request: Tensor, rows: CandidateRows) -> Tensor:
        read = torch.cat([candidate, *self.more], dim=1)
        self.more.clear()
        return self.heads(read, request, rows)


class Extended(InterFormer):
    words: tuple[str, ...] = ()

    def __init__(self, spec: FeatureSpec, config: InterFormer.Config) -> None:
        super().__init__(spec, config)
        self.events = spec.histories if "units" in self.words else ()
        self.units = nn.ModuleList(ActivationUnit(spec, event, config.dim, [64]) for event in self.events)
        width = sum(len(event.fields) for event in self.events)
        width += (spec.num_request_tokens + spec.num_candidate_tokens) * ("flat" in self.words)
        own = (config.num_cls + config.num_pma + width) * config.dim
        request = (config.num_cls + config.num_recent) * config.dim
        self.heads = Heads(TaskHeads(own, config.head_hidden, spec.num_outputs, config.dropout, request))
        if "flat" in self.words:
            self.head_summary.register_forward_pre_hook(self._keep)

    def _keep(self, _: nn.Module, last: tuple[Tensor]) -> None:
        self.heads.more.append(norms.rms_norm(last[0]).flatten(1))

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        rows = CandidateRows.of(batch)
        for event, unit in zip(self.events, self.units, strict=True):
            self.heads.more.append(unit(tokens.candidate, tokens.histories[event.name], rows))
        return super().forward(tokens, batch)


class Bent(nn.Module):
    """A linear layer and a network of one hidden layer beside it, in place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.in_features = linear, linear.in_features
        self.network = MLP(linear.in_features, [64], linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.network(x)


class BentAssembly(embedding.TokenAssembly):
    def __init__(self, spec: FeatureSpec, *arguments: Any) -> None:
        super().__init__(spec, *arguments)
        for name in ("request_dense", "candidate_dense"):
            if (linear := getattr(self, name)) is not None:
                setattr(self, name, Bent(linear))
        for vectors in (self.request_vectors, self.candidate_vectors):
            for index, linear in enumerate(vectors):
                vectors[index] = Bent(linear)


def grouped(spec: FeatureSpec) -> FeatureSpec:
    """The same columns, those of each group of statistics (what stands before the dot) as one vector."""

    def split(names: tuple[str, ...], vectors: tuple[VectorFeature, ...]) -> list[tuple[Any, ...]]:
        groups = Counter(name.partition(".")[0] for name in names if "." in name)
        assert all("." in name for name in names[len(names) - groups.total() :])
        made = (VectorFeature(f"of_{group}", width) for group, width in groups.items())
        return [names[: len(names) - groups.total()], (*made, *vectors)]

    request, request_vectors = split(spec.request_dense, spec.request_vectors)
    candidate, candidate_vectors = split(spec.candidate_dense, spec.candidate_vectors)
    return replace(
        spec,
        request_dense=request,
        request_vectors=request_vectors,
        candidate_dense=candidate,
        candidate_vectors=candidate_vectors,
    )


@contextmanager
def patched(config: Config) -> Iterator[type]:
    """The trainer of a configuration, while the patches of its tags are in place."""
    from train import build
    from train.trainer import Trainer

    words = config.tracking.tags
    arch, build_source = build.build_arch, build.build_source
    head = tuple(word for word in words if word in ("flat", "units"))
    numbers = {key: float(value) for key, _, value in (word.partition("=") for word in words) if value}

    def make(chosen: Any, spec: FeatureSpec) -> nn.Module:
        return type("Extended", (Extended,), {"words": head})(spec, chosen) if head else arch(chosen, spec)

    class Restarting(Trainer):
        def _train_epoch(self) -> None:
            if self.progress.epoch and not self.progress.consumed:
                begin_anew(self.model.fused_optimizer, self.config.model.table_std)
            super()._train_epoch()

    def read(*arguments: Any) -> Any:
        source = build_source(*arguments)
        if "grouped" in words:
            source.spec = grouped(source.spec)
        return source

    with (
        patch.object(build, "build_arch", make),
        patch.object(build, "build_source", read),
        patch.object(embedding, "TokenAssembly", BentAssembly if "bent" in words else embedding.TokenAssembly),
        patch.object(norms, "QUIET", numbers.get("quiet", norms.QUIET)),
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
    """Those of arms `FIRST`, then those of the first seed, the arms in their order."""
    names = list(dict.fromkeys(arm for model in models for arm in ARMS[model] if not arms or arm in arms))
    found = [
        (log, model, arm, seed)
        for seed in seeds
        for arm in names
        for model in models
        for log in logs
        if arm in ARMS[model] and (log in GENERATED or not OF_STATISTICS.match(arm))
    ]
    return [
        {
            "name": f"{log}/{model}/{arm}/{seed}",
            "overrides": [*LOGS[log], *_overrides(log, model, arm), f"runtime.seed={seed}", *extra],
            "by": "variants",
        }
        for log, model, arm, seed in sorted(found, key=lambda each: each[2] not in FIRST)
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


def prepare(log: str) -> None:
    """Generate a log unless it is there, and prepare its data."""
    from tools.datasets import business_logs
    from train.data import build_source

    if log in GENERATED and not Path("prepared", f"{log}_log", "items.parquet").exists():
        business_logs.main([log])
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
    parser.add_argument(
        "--store", type=Path, nargs="?", const=STORED / "variants.json", help="write this file, which the page shows"
    )
    extra = [each for each in arguments if "=" in each and not each.startswith("--")]
    options = parser.parse_args([each for each in arguments if each not in extra])
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(prepare, options.logs))
    planned = jobs(options.logs, options.models, options.arms, options.seeds, extra)
    whole = run.run(lambda _: planned, options.out, parallel=options.parallel, seconds=options.seconds)
    found = run.results(options.out)
    print("\n".join(compared(list(found.values()))))
    if options.store:
        options.store.write_text(dumped(found))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

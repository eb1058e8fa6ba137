"""What sharing a request saves: `python -m train.commands.ratio out=DIR [candidates=2048] [ratios=1,8,64] [key=value]`.

Times the architecture, without embedding tables, on synthetic batches of the same number of candidates with 1, 8 or 64
of them to a request: forward, and a training step of forward and backward, with the peak memory of each. On a GPU each
is timed once more as a CUDA graph: the time of the kernels without launches by the host. It is compared with the same
architecture on the same candidates with a copy of the request each; the copies are made outside the timing, and the
logits of both are compared first. Overrides go to `model.*` (InterFormer.Config) and `data.*` (SyntheticConfig). Writes
`ratio.json` and `ratio.png`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from torch import Tensor, nn
    from torch.nn.functional import binary_cross_entropy_with_logits

    from modules.batch import RequestBatch
    from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
    from modules.models import build as build_arch
    from modules.models.interformer import InterFormer
    from train.config.overrides import split_options
    from train.config.schema import SyntheticConfig
    from train.data import SyntheticSource
    from train.process import errors
    from train.process.files import write_json
    from train.record import versions
    from train.record.plots import plot_ratios

ROUNDS = 10


def measure(model: InterFormer.Config, data: SyntheticConfig, candidates: int, ratio: int) -> list[dict[str, Any]]:
    """A row for each arm: milliseconds and peak MiB of a forward and of a training step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = dataclasses.replace(data, candidates=ratio, max_candidates=ratio, num_requests=max(candidates // ratio, 2))
    source = SyntheticSource(data)
    batch = source.batch("train", np.arange(candidates // ratio)).to(device)
    embedding = FeatureEmbedding(source.spec, model.dim, device, model.table_dims).to(device)
    rows, logits = [], []
    for arm, shown in (("operators", batch), ("copies", batch.expand())):
        torch.manual_seed(0)
        spec = dataclasses.replace(source.spec, max_candidates=ratio if arm == "operators" else 1)
        with torch.device(device):
            arch = build_arch(model, spec)
        with torch.no_grad():
            tokens = embedding(shown)
            logits.append(_forward(arch, tokens, shown))
        forward = _timed(partial(_without_gradients, arch, tokens, shown), device)
        step = _timed(partial(_step, arch, tokens, shown), device)
        rows.append({"ratio": ratio, "arm": arm, "forward": forward, "step": step})
    # Logits are of the order of one, and bfloat16 rounds them in another order of operations.
    torch.testing.assert_close(*logits, rtol=5e-2, atol=5e-2)
    return rows


def _forward(arch: nn.Module, tokens: Tokens, batch: RequestBatch) -> Tensor:
    with torch.autocast(batch.labels.device.type, torch.bfloat16):
        return arch(tokens, batch)


def _without_gradients(arch: nn.Module, tokens: Tokens, batch: RequestBatch) -> None:
    with torch.no_grad():
        _forward(arch, tokens, batch)


def _step(arch: nn.Module, tokens: Tokens, batch: RequestBatch) -> None:
    arch.zero_grad()
    logits = _forward(arch, tokens, batch)
    binary_cross_entropy_with_logits(logits, batch.labels.nan_to_num()).backward()


def _timed(run: Callable[[], None], device: torch.device) -> dict[str, float | None]:
    """Median milliseconds of `run`; on a GPU also its peak memory, and milliseconds as a CUDA graph."""

    def once(call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) * 1e3

    once(run)
    once(run)
    memory = graph_ms = None
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        once(run)
        memory = (torch.cuda.max_memory_allocated(device) - before) / 2**20
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        once(graph.replay)
        graph_ms = statistics.median(once(graph.replay) for _ in range(ROUNDS))
    return {"ms": statistics.median(once(run) for _ in range(ROUNDS)), "peak_mib": memory, "graph_ms": graph_ms}


def _shown(row: dict[str, Any], part: str) -> str:
    text = f"{part} {row[part]['ms']:.2f} ms"
    if row[part]["graph_ms"] is None:
        return text
    return f"{text} ({row[part]['graph_ms']:.2f} as a graph), {row[part]['peak_mib']:.0f} MiB"


def main(arguments: list[str]) -> list[dict[str, Any]]:
    defaults = {"out": "", "candidates": "2048", "ratios": "1,8,64"}
    options, overrides = split_options(arguments, defaults, "out=DIR")
    for override in overrides:
        if not override.startswith(("model.", "data.")):
            raise ValueError(f"{override!r} is neither of {', '.join(options)} nor model.* or data.*; e.g. out=DIR")
    if not options["out"]:
        raise ValueError("name a folder to write to, e.g. out=ratio")
    candidates, ratios = int(options["candidates"]), [int(ratio) for ratio in options["ratios"].split(",")]
    if any(ratio < 1 or candidates < ratio or candidates % ratio for ratio in ratios):
        raise ValueError(f"candidates={candidates} must be a multiple of each of ratios={ratios}, e.g. candidates=2048")
    config = OmegaConf.structured(
        {"model": InterFormer.Config(dim=128, num_layers=3), "data": SyntheticConfig(max_history=500, mean_history=250)}
    )
    merged = OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.from_dotlist(overrides)))
    assert isinstance(merged, dict)
    folder, rows = Path(options["out"]), []
    folder.mkdir(parents=True, exist_ok=True)
    for ratio in ratios:
        rows += measure(merged["model"], merged["data"], candidates, ratio)
        for row in rows[-2:]:
            print(f"ratio {ratio:>3} {row['arm']:<10} {_shown(row, 'forward')}; {_shown(row, 'step')}")
    about = {
        "overrides": overrides,
        "candidates": candidates,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions.collect(),
    }
    write_json(folder / "ratio.json", about | {"rows": rows})
    plot_ratios(rows, folder / "ratio.png")
    return rows


if __name__ == "__main__":
    errors.run(main)

"""Score requests with what `train.commands.export` wrote; `python -m train.commands.score export=DIR` measures latency.

The command takes a request of the run's test split (its first, or `request=NUMBER`), gives it 10 to 10,000 candidates
(`candidates=10,100,...`) by repeating its own, and prints the milliseconds that scoring them takes: with the exported
model, with the same architecture in eager PyTorch, and with that on a batch in which every candidate has a copy of the
request, its history and its embeddings included (up to `broadcast_limit=1000` candidates: such a batch grows with every
one). It writes them to DIR/latency.json. The copies are made, and lie on the device, before the clock starts.

On a GPU each of the three replays CUDA graphs of the architecture, which would otherwise wait for the host's launches.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import numpy as np
    import torch
    from torch import Tensor

    from kernels.core import dispatch
    from modules.batch import RequestBatch, with_candidates
    from modules.models.ranking import RankingModel
    from modules.models.scoring import ScoringArch, scoring_inputs, vendor_inputs
    from modules.pretrained import read_description
    from train.build import load_model
    from train.checkpoint import load as checkpoint
    from train.config.compose import from_dict
    from train.config.environment import to_saved
    from train.config.overrides import split_options
    from train.data import build_source
    from train.process import errors
    from train.process.files import write_json
    from train.process.precision import compute_dtype
    from train.record import versions
    from train.serving.scorer import ABOUT, PROGRAM, Replayed, Scorer, read_about

ROUNDS = 20


def latencies(
    scorer: Scorer,
    models: tuple[RankingModel, ...],
    dtype: torch.dtype,
    request: RequestBatch,
    counts: list[int],
    broadcast_limit: int,
) -> list[dict[str, Any]]:
    """Median milliseconds of a request for each number of candidates; copies are made outside the timing.

    `models`: the one that was exported, for a request of many candidates and for requests of one.
    """
    eager, broadcast = (_eager(model, dtype, scorer) for model in models)
    rows = []
    for count in counts:
        batch = with_candidates(request, count).to(scorer.device)
        row: dict[str, Any] = {"candidates": count}
        row |= {"exported_ms": _milliseconds(scorer, batch), "eager_ms": _milliseconds(eager, batch)}
        if count <= broadcast_limit:
            expanded = batch.expand()
            # The two differ by the roundings of bfloat16, if the run had them.
            torch.testing.assert_close(scorer(batch), broadcast(expanded), rtol=2e-2, atol=2e-2)
            row["broadcast_ms"] = _milliseconds(broadcast, expanded)
        rows.append(row)
    return rows


def _eager(model: RankingModel, dtype: torch.dtype, scorer: Scorer) -> Callable[[RequestBatch], Tensor]:
    arch: Callable[..., Tensor] = ScoringArch(model.arch, dtype).eval()
    if scorer.traced:  # else it may wait for the device, and then there are no graphs of it
        arch = Replayed(arch, scorer.spec, scorer.device)

    @torch.no_grad()
    def score(batch: RequestBatch) -> Tensor:
        tokens = model.embedding(batch)
        inputs = (*scoring_inputs(tokens, batch.candidate_offsets), *vendor_inputs(tokens, batch))
        return scorer.losses.predict(arch(*inputs))

    return score


def check(folder: Path, model: RankingModel, dtype: torch.dtype, request: RequestBatch) -> None:
    """RuntimeError unless the compiled model in `folder` can be loaded and scores `request` as `model` does.

    After an error, `folder` no longer counts as an export: a `Scorer` of it raises an error instead of crashing.
    """
    try:
        _check_loading(folder / PROGRAM)
        _check_scores(folder, model, dtype, request)
    except RuntimeError:
        (folder / ABOUT).unlink()
        raise


def _check_loading(package: Path) -> None:
    """In another process, which a crash in the library would end."""
    load = f"import sys; from {Scorer.__module__} import Scorer; Scorer(sys.argv[1])"
    ended = subprocess.run([sys.executable, "-c", load, str(package.parent)], capture_output=True, text=True)
    if ended.returncode < 0:
        raise RuntimeError(
            f"{package} was compiled, but {signal.Signals(-ended.returncode).name} ends a process that loads it. This "
            "happens where the C++ compiler links a static copy of its library: let CXX name one that links the shared "
            "libstdc++.so.6, or export with compile=false"
        )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{package} was compiled, but cannot be loaded ({reason}); export with compile=false")


def _check_scores(folder: Path, model: RankingModel, dtype: torch.dtype, request: RequestBatch) -> None:
    scorer = Scorer(folder)
    eager = _eager(model, dtype, scorer)
    for count in (1, scorer.max_candidates):
        batch = with_candidates(request, count).to(scorer.device)
        try:  # the two differ by the roundings of bfloat16
            torch.testing.assert_close(scorer(batch), eager(batch), rtol=2e-2, atol=2e-2)
        except (RuntimeError, AssertionError) as error:
            raise RuntimeError(
                f"{folder / PROGRAM} was compiled, but for {count} of a request's candidates it does not give the "
                f"model's scores ({error}); export with compile=false"
            ) from error


def _milliseconds(score: Callable[[RequestBatch], Tensor], batch: RequestBatch) -> float:
    times = []
    for _ in range(3 + ROUNDS):
        start = time.perf_counter()
        score(batch).cpu()  # waits for the device, as a user of the scores does
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def main(arguments: list[str]) -> list[dict[str, Any]]:
    defaults = {"export": "", "candidates": "10,100,1000,10000", "broadcast_limit": "1000", "request": "0"}
    options, others = split_options(arguments, defaults, "export=DIR candidates=10,100")
    if others:
        raise ValueError(f"{others[0]!r} is not one of {', '.join(f'{name}=...' for name in options)}")
    given = options["candidates"].split(",")
    if not all(count.isdecimal() and int(count) for count in given):
        raise ValueError(f"candidates={options['candidates']} must be numbers of at least 1, e.g. candidates=10,100")
    counts = [int(count) for count in given]
    folder = Path(options["export"])
    about = read_about(folder)
    if about.get("checkpoint") is None:
        raise ValueError(f"{folder} names no checkpoint: the command times exports of train.commands.export")
    path = Path(about["checkpoint"])
    config = from_dict(checkpoint.read_meta(path)["config"], about.get("overrides", []))
    dispatch.force(config.runtime.kernels)
    source = build_source(config.data)
    last = source.num_requests("test") - 1
    if not options["request"].isdecimal() or int(options["request"]) > last:
        raise ValueError(f"request={options['request']} must be a number from 0 to {last}: one of the test split")
    request = source.batch("test", np.array([int(options["request"])]))
    device = torch.device(about["device"])
    most = read_description(folder)[1].max_candidates
    models = tuple(load_model(path, config, source, each, device) for each in (most, 1))
    models[1].embedding = models[0].embedding  # one copy of the tables
    scorer = Scorer(folder)  # after a class of your own was imported
    dtype = compute_dtype(config.precision.name, device)
    rows = latencies(scorer, models, dtype, request, counts, int(options["broadcast_limit"]))
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    result = {
        "device": torch.cuda.get_device_name() if scorer.device.type == "cuda" else scorer.device.type,
        "versions": versions.collect(),
        "compiled": about["compiled"],
        "eager": about.get("eager"),
        "model": to_saved(config)["model"],
        "events": int(request.history_times.lengths().sum()),
        "rows": rows,
    }
    write_json(folder / "latency.json", result)
    return rows


if __name__ == "__main__":
    errors.run(main)

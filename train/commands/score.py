"""Score requests with what `train.commands.export` wrote; `python -m train.commands.score export=DIR` measures latency.

The command takes a request of the run's test split (its first, or `request=NUMBER`), gives it 10 to 10,000 candidates
(`candidates=10,100,...`) by repeating its own, and prints the milliseconds that scoring them takes: with the exported
model, with the same architecture in eager PyTorch, and with that on a batch in which every candidate has a copy of the
request, its history and its embeddings included (up to `broadcast_limit=1000` candidates: such a batch grows with every
one). It writes them to DIR/latency.json, and a plot to DIR/latency.png. The copies are made, and lie on the device,
before the clock starts.

On a GPU each of the three replays CUDA graphs of the architecture, which would otherwise wait for the host's launches.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.pt2_archive._package import AOTICompiledModel

from kernels.core import dispatch
from modules.batch import FeatureSpec, RequestBatch, with_candidates
from modules.embedding import FeatureEmbedding
from modules.models.ranking import RankingModel
from modules.models.scoring import ScoringArch, Sequences, scoring_inputs
from train.build import load_model
from train.checkpoint import load as checkpoint
from train.config.compose import from_dict
from train.config.overrides import split_options
from train.data import build_source
from train.data.source import spec_from_dict
from train.loss import TaskLosses
from train.process import versions
from train.process.files import write_json
from train.process.precision import compute_dtype
from train.speedup.replay import Replay

OPERATORS = ("kernels", "modules")
"""Packages whose modules an export may name."""
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
ROUNDS = 20
SMALLEST = 16
"""Candidates that a request is filled up to at least, so that graphs serve many numbers of them."""


class Scorer:
    """Scores the candidates of requests: embeddings are looked up eagerly, the rest is the exported model.

    On a GPU it replays CUDA graphs: one for each number of candidates, rounded up to a power of two, and each number of
    events, captured at the third such request. Only the first 16 of these have graphs; others are launched from the
    host. If histories are cut to one length, there are few. A graph's inputs and results have fixed memory, so use a
    scorer from one thread at a time.

    ValueError when `folder` was not written by `train.commands.export`. `model.pt2` is a program, or a library: as with
    any other, load only one that you trust. Nothing else in the folder can run code.
    """

    def __init__(self, folder: Path) -> None:
        try:
            about = json.loads((folder / "export.json").read_text())
        except OSError as error:
            raise ValueError(
                f"{folder} holds no exported model ({error}); write one with train.commands.export"
            ) from error
        _import_operators(about["operators"])
        longest = max((event["max_length"] for event in about["spec"]["histories"]), default=1)
        self.spec = spec_from_dict(about["spec"], longest)
        self.device = torch.device(about["device"])
        self.max_candidates = about["max_candidates"]
        self.embedding = FeatureEmbedding(self.spec, about["dim"], "cpu", about.get("table_dims")).eval()
        weights = torch.load(folder / "embedding.pt", map_location="cpu", weights_only=True)
        self.embedding.load_state_dict(weights)
        self.embedding.to(self.device)
        program = _load_compiled(folder) if about["compiled"] else _load_program(folder / "model.pt2")
        self._arch = _Replayed(program, self.spec, self.device)
        tasks = about.get("tasks", {})
        if own := [chosen["loss"] for chosen in tasks.values() if "." in chosen["loss"]]:
            raise ValueError(f"{folder}/export.json names {own[0]}, which no export does: scoring imports no such code")
        self.losses = TaskLosses(tasks, self.spec.tasks)

    @torch.no_grad()
    def __call__(self, batch: RequestBatch) -> Tensor:
        """Predictions [N, tasks] of the candidates of a batch of one request, probabilities of binary tasks; a task of
        several classes has a column for each.

        ValueError for several requests, too many candidates or events, and numbers that are not finite (of a batch on
        the host; one that is on the GPU already is not read back).
        """
        count = batch.num_candidates
        if batch.num_requests != 1 or not 1 <= count <= self.max_candidates:
            raise ValueError(
                f"a batch is one request with 1 to {self.max_candidates} candidates, got {batch.num_requests} requests "
                f"and {count} candidates; score requests one by one, or export with a larger max_candidates"
            )
        if batch.row.device.type == "cpu":
            _refuse_not_finite(batch, self.spec)
        if batch.row.device.type != self.device.type:  # after a move, lengths would be read from the device again
            batch = batch.to(self.device)
        tokens = self.embedding(batch)
        for event in self.spec.histories:
            # Shapes are known on the host; reading the batch's lengths from a GPU would be a sync.
            length = tokens.histories[event.name].values.shape[0]
            if length > event.max_length:
                raise ValueError(
                    f"the request has {length} events of type {event.name!r}, more than the {event.max_length} that "
                    "were exported; keep the newest ones, or train with a larger data.max_history"
                )
        request, candidate, offsets, histories = scoring_inputs(tokens, batch.candidate_offsets)
        if self.device.type == "cuda":
            candidate, offsets = _rounded_up(candidate, self.max_candidates)
        return self.losses.predict(self._arch(request, candidate, offsets, histories)[:count])


def _import_operators(modules: list[str]) -> None:
    """Import the modules that define an export's operators. ValueError for one that is not of this project.

    Otherwise an export could name any module. One that has been imported already may define operators of your own.
    """
    for module in modules:
        if module.partition(".")[0] not in OPERATORS and module not in sys.modules:
            raise ValueError(
                f"the export needs operators of {module!r}, which is none of {', '.join(f'{p}.*' for p in OPERATORS)}; "
                "if you trust it, import it before the Scorer is made"
            )
        importlib.import_module(module)


def _refuse_not_finite(batch: RequestBatch, spec: FeatureSpec) -> None:
    sides = (
        ("request", spec.request_dense, batch.request_dense),
        ("candidate", spec.candidate_dense, batch.candidate_dense),
    )
    for whose, names, values in sides:
        finite = values.isfinite()
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            raise ValueError(
                f"{whose} {row} has {names[column]}={values[row, column].item()}; numbers must be finite. Those of a "
                "batch are scaled, and a missing one is 0, as train.data.reader makes them"
            )


def _load_program(path: Path) -> Callable[..., Tensor]:
    """The exported program, without unpickling more than tensors.

    `torch.export.load` unpickles sample inputs, and constants that are no tensors: ValueError for a file with these.
    """
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if "/constants/" in name and name.rpartition("/")[2].startswith(("custom_obj", "opaque_obj")):
                raise ValueError(f"{path} holds {name}, an object that is no tensor; write the export anew")
    before = os.environ.get(WEIGHTS_ONLY)
    os.environ[WEIGHTS_ONLY] = "1"  # torch.load then reads nothing but tensors, whatever its caller asks for
    try:
        return torch.export.load(path).module()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds something else than tensors and a program; write the export anew") from error
    finally:
        del os.environ[WEIGHTS_ONLY]
        if before is not None:
            os.environ[WEIGHTS_ONLY] = before


def _load_compiled(folder: Path) -> AOTICompiledModel:
    # The loader that C++ servers use. `aoti_load_package` also compiles and runs a program for each kind of vector
    # instructions of the host, to warn if the export was made on another host, which can take minutes. The runner does
    # without the events by which threads could share it: a capture does not allow them.
    return AOTICompiledModel(torch._C._aoti.AOTIModelPackageLoader(str(folder / "model.pt2"), "model", True, 1, -1))


def _rounded_up(candidate: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Candidates up to the next power of two, at most `most`, and the offsets that make them all the request's."""
    size = min(most, max(SMALLEST, 1 << (candidate.shape[0] - 1).bit_length()))
    rest = candidate.new_zeros(size - candidate.shape[0], *candidate.shape[1:])
    return torch.cat([candidate, rest]), torch.arange(2, device=candidate.device) * size


class _Replayed:
    """`arch` on `scoring_inputs`; on a GPU with a graph for each shape that recurs, see `Replay`."""

    def __init__(self, arch: Callable[..., Tensor], spec: FeatureSpec, device: torch.device) -> None:
        self._arch = arch
        self._names = [event.name for event in spec.histories]
        self._replay = Replay(self._flat, device.type == "cuda")

    def __call__(self, request: Tensor, candidate: Tensor, offsets: Tensor, histories: Sequences) -> Tensor:
        parts = (part for name in self._names for part in histories[name])
        return self._replay(request, candidate, offsets, *parts)

    def _flat(self, request: Tensor, candidate: Tensor, offsets: Tensor, *parts: Tensor) -> Tensor:
        histories = {name: parts[3 * i : 3 * i + 3] for i, name in enumerate(self._names)}
        return self._arch(request, candidate, offsets, histories)


def latencies(
    scorer: Scorer,
    models: tuple[RankingModel, RankingModel],
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
    arch = _Replayed(ScoringArch(model.arch, dtype).eval(), model.embedding.assemble.spec, scorer.device)

    @torch.no_grad()
    def score(batch: RequestBatch) -> Tensor:
        return scorer.losses.predict(arch(*scoring_inputs(model.embedding(batch), batch.candidate_offsets)))

    return score


def check(folder: Path, model: RankingModel, dtype: torch.dtype, request: RequestBatch) -> None:
    """RuntimeError unless the compiled model in `folder` can be loaded and scores `request` as `model` does.

    After an error, `folder` no longer counts as an export: a `Scorer` of it raises an error instead of crashing.
    """
    try:
        _check(folder, model, dtype, request)
    except RuntimeError:
        (folder / "export.json").unlink()
        raise


def _check(folder: Path, model: RankingModel, dtype: torch.dtype, request: RequestBatch) -> None:
    package = folder / "model.pt2"
    # First in another process, which a crash in the library would end.
    load = "import sys, pathlib; from train.commands.score import Scorer; Scorer(pathlib.Path(sys.argv[1]))"
    ended = subprocess.run([sys.executable, "-c", load, str(folder)], capture_output=True, text=True)
    if ended.returncode < 0:
        raise RuntimeError(
            f"{package} was compiled, but {signal.Signals(-ended.returncode).name} ends a process that loads it. This "
            "happens where the C++ compiler links a static copy of its library: let CXX name one that links the shared "
            "libstdc++.so.6, or export with compile=false"
        )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{package} was compiled, but cannot be loaded ({reason}); export with compile=false")
    scorer = Scorer(folder)
    eager = _eager(model, dtype, scorer)
    for count in (1, scorer.max_candidates):
        batch = with_candidates(request, count).to(scorer.device)
        try:  # the two differ by the roundings of bfloat16
            torch.testing.assert_close(scorer(batch), eager(batch), rtol=2e-2, atol=2e-2)
        except (RuntimeError, AssertionError) as error:
            raise RuntimeError(
                f"{package} was compiled, but for {count} of a request's candidates it does not give the model's "
                f"scores ({error}); export with compile=false"
            ) from error


def _milliseconds(score: Callable[[RequestBatch], Tensor], batch: RequestBatch) -> float:
    times = []
    for _ in range(3 + ROUNDS):
        start = time.perf_counter()
        score(batch).cpu()  # waits for the device, as a user of the scores does
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def main(arguments: list[str]) -> list[dict[str, Any]]:
    from train.record.plots import plot_latency  # imported here, so that scoring does not need matplotlib

    defaults = {"export": "", "candidates": "10,100,1000,10000", "broadcast_limit": "1000", "request": "0"}
    options, others = split_options(arguments, defaults, "export=DIR candidates=10,100")
    if others:
        raise ValueError(f"{others[0]!r} is not one of {', '.join(f'{name}=...' for name in options)}")
    given = options["candidates"].split(",")
    if not all(count.isdecimal() and int(count) for count in given):
        raise ValueError(f"candidates={options['candidates']} must be numbers of at least 1, e.g. candidates=10,100")
    counts = [int(count) for count in given]
    folder = Path(options["export"])
    scorer = Scorer(folder)
    about = json.loads((folder / "export.json").read_text())
    path = Path(about["checkpoint"])
    config = from_dict(checkpoint.read_meta(path)["config"], about["overrides"])
    dispatch.force(config.runtime.kernels)
    source = build_source(config.data)
    last = source.num_requests("test") - 1
    if not options["request"].isdecimal() or int(options["request"]) > last:
        raise ValueError(f"request={options['request']} must be a number from 0 to {last}: one of the test split")
    request = source.batch("test", np.array([int(options["request"])]))
    most = scorer.max_candidates
    models = (load_model(path, config, source, most, scorer.device), load_model(path, config, source, 1, scorer.device))
    models[1].embedding = models[0].embedding  # one copy of the tables
    dtype = compute_dtype(config.precision.name, scorer.device)
    rows = latencies(scorer, models, dtype, request, counts, int(options["broadcast_limit"]))
    for row in rows:
        print("  ".join(f"{name} {value:g}" for name, value in row.items()))
    result = {
        "device": torch.cuda.get_device_name() if scorer.device.type == "cuda" else scorer.device.type,
        "versions": versions.collect(),
        "compiled": about["compiled"],
        "model": dataclasses.asdict(config.model),
        "events": int(request.history_times.lengths().sum()),
        "rows": rows,
    }
    write_json(folder / "latency.json", result)
    plot_latency(rows, folder / "latency.png")
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])

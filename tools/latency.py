"""Latency of requests on a GPU, by models of the production experiments: `python -m tools.latency OUT`.

Fresh models at the widths of `configs/experiment/*_h200.yaml`, in bfloat16. A request has 200 or 2,000 events, and 64
to 10,000 candidates. Each row of OUT/latency.jsonl is appended when it is measured; at the end, or after `--seconds`
(110), all are written to OUT/latency.json and printed.

| serving | what |
|---|---|
| `shared` | as the scorer serves eagerly: the request once, the architecture by CUDA graphs |
| `copied` | the same weights on a copy of the request for each candidate, made and on the GPU before the clock starts |
| `split` | net splitting, of InterFormer: the user side once, and a copy for each candidate where it is read |
| `launched` | `shared` without CUDA graphs |
| `aoti` | the exported program, compiled by AOTInductor, by CUDA graphs |
| `kept` | the exported program, with the user side kept from an earlier request (`user_side_bytes`), by CUDA graphs |
| `plain` | `shared` with every operator in plain PyTorch, compiled by `torch.compile`, by CUDA graphs |

The clock of a request starts with its batch in host memory and stops with its scores there. `parts` of `shared`
are the lookup, by a CUDA graph of it; the user side: the architecture with one candidate; the candidate side: what it
takes longer with all; the host: the rest.

Models are built and kernels compiled by processes side by side. Then they take turns on their GPU: one measures at a
time. With two GPUs, what has to be compiled is measured on the second.

On a CPU, in float32 and with small tables, choose fewer and smaller sizes: `--seconds 900 --events 40 --candidates 2048
--only interformer_production.shared --set model.dim=64 data.num_request_features=16 data.num_candidate_features=8`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from kernels.core import dispatch
from modules.batch import RequestBatch, with_candidates
from modules.broadcast import CandidateRows
from modules.layers.attention import target_attention
from modules.layers.interaction import lce
from modules.layers.interaction.dot_cross import DHENLayer
from modules.models import build
from modules.models.scoring import ScoringArch, scoring_inputs
from modules.pretrained import PretrainedModel
from tools.speeds import append, rows_of
from train.commands.export import export_arch, write_program
from train.config.compose import to_config
from train.config.files import composed
from train.data import build_source
from train.process.files import write_json
from train.record import versions
from train.serving.scorer import Replayed, load_compiled
from train.serving.user_side import Halves, Kept
from train.speedup.replay import Replay

MODELS = ("interformer_production", "kunlun", "gem")
CANDIDATES = (2048, 512, 10_000, 64)
HISTORIES = (392, 40)
"""data.max_history of requests with about 2,000 and 200 events, over the ten types of data=production."""
MOST = 10_000
JOBS = [(name, serving) for serving in ("shared", "kept", "aoti", "plain") for name in MODELS]
COMPILING = 60
"""Seconds after which a compiler is stopped."""
ROUNDS, ROW_SECONDS = 200, 0.6
SMALL_TABLES = ["data.num_users=50", "data.num_items=500"]
FILE = "latency.jsonl"


class Job:
    """One model, served in one way."""

    def __init__(self, out: Path, name: str, serving: str, options: argparse.Namespace) -> None:
        self.out, self.name, self.serving = out, name, serving
        self.counts, self.overrides = options.candidates, options.set
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        config = self._config(1000)
        self.spec = replace(build_source(config.data).spec, max_candidates=MOST)
        torch.manual_seed(0)
        self.model = PretrainedModel(config.model, self.spec, self.device).to(self.device).eval()
        self.model.local_embedding.join(self.device)
        for parameter in self.model.arch.parameters():
            if not parameter.any():  # with heads that begin at zero, all scores would be alike
                torch.nn.init.normal_(parameter, std=0.1)
        one = build(config.model, replace(self.spec, max_candidates=1)).to(self.device)
        one.load_state_dict(self.model.arch.state_dict())
        self.copying = self.arch(one)
        requests = [self._request(length) for length in options.events]
        self.requests = {int(each.history_times.lengths().sum()): each for each in requests}

    def _config(self, max_history: int) -> Any:
        small = SMALL_TABLES if self.device.type == "cpu" else []
        given = [f"+experiment={self.name}_h200", f"data.max_history={max_history}", *small, *self.overrides]
        return to_config(composed(given))

    def _request(self, max_history: int) -> RequestBatch:
        return build_source(self._config(max_history).data).batch("train", np.array([7]))

    def arch(self, arch: torch.nn.Module) -> ScoringArch:
        return ScoringArch(arch, self.dtype).eval()

    @torch.no_grad()
    def run(self, ready: Callable[[], None]) -> None:
        counts = self.counts
        shapes = [(counts[0], events) for events in self.requests]
        shapes += [(count, events) for count in counts[1:] for events in self.requests]
        about: dict[str, Any] = {}
        started = time.monotonic()
        arch: Callable[..., Tensor] = self.arch(self.model.arch)
        if self.serving in ("aoti", "kept"):
            arch = self._exported(about)
        elif self.serving == "plain":
            dispatch.force("reference")
            arch, shapes = torch.compile(arch, dynamic=False), shapes[:2]
        scores = {events: partial(self._score, Replayed(arch, self.spec, self.device)) for events in self.requests}
        if self.serving == "kept":
            halves = Halves(cast(GraphModule, arch), len(self.spec.histories), self.device)
            scores = {events: partial(self._score_kept, halves, self._kept(halves, events)) for events in self.requests}
        for count, events in shapes if self.serving == "plain" else [(64, events) for events in self.requests]:
            with limited(COMPILING):
                scores[events](self._batch(count, events))
        about["ready_seconds"] = round(time.monotonic() - started, 1)
        ready()
        for count, events in shapes:
            batch = self._batch(count, events)
            with turn(self.out):
                p50 = self._row(self.serving, scores[events], batch, count, events, about)
                if self.serving == "shared" and p50 is not None and self.device.type == "cuda":
                    with suppressed_to_row(self, "parts", count, events):
                        self._write("parts", count, events, self._parts(scores[events].args[0], batch, events, p50))
            if self.serving == "shared" and count == counts[0]:
                with turn(self.out):
                    self._copied(count, events)
                    if self.name.startswith("interformer"):
                        with net_splitting(), suppressed_to_row(self, "split", count, events):
                            split = partial(self._score, Replayed(self.arch(self.model.arch), self.spec, self.device))
                            largest = (split(batch) - scores[events](batch)).abs().max().item()
                            self._row("split", split, batch, count, events, {"largest_difference": largest})
                    self._row("launched", partial(self._score, arch), batch, count, events, {})
        for count, events in sorted(shapes[2:], key=np.prod) if self.serving == "shared" else []:
            with turn(self.out):
                self._copied(count, events)

    def _exported(self, about: dict[str, Any]) -> Callable[..., Tensor]:
        started = time.monotonic()
        with limited(COMPILING):
            batch = self._batch(1000, max(self.requests)).to(self.device)
            program = export_arch(self.model, batch, self.dtype, MOST)
            about["export_seconds"] = round(time.monotonic() - started, 1)
            if self.serving == "kept":
                return program.module()
            folder = self.out / f"{self.name}.aoti"
            folder.mkdir(exist_ok=True)
            write_program(program, folder / "model.pt2", True)
            about["compile_seconds"] = round(time.monotonic() - started, 1)
            return load_compiled(folder)

    def _kept(self, halves: Halves, events: int) -> Kept:
        batch = self._batch(1, events).to(self.device)
        request, _, _, histories = scoring_inputs(self.model.embedding(batch), batch.candidate_offsets)
        return halves.user(request, [part for event in self.spec.histories for part in histories[event.name]])

    def _moved(self, batch: RequestBatch) -> RequestBatch:
        """As the scorer does it."""
        if batch.row.device.type != self.device.type:
            for features in batch.sparse:
                features.length_per_key()
            batch = batch.to(self.device)
        return batch

    def _score_kept(self, halves: Halves, kept: Kept, batch: RequestBatch) -> Tensor:
        batch = self._moved(batch)
        candidate = self.model.local_embedding.candidates(batch)
        return torch.sigmoid(halves.rest(kept, candidate, batch.candidate_offsets))

    def _batch(self, count: int, events: int) -> RequestBatch:
        return with_candidates(self.requests[events], count)

    def _copied(self, count: int, events: int) -> None:
        """The batch in which each candidate has a copy of its request."""
        with suppressed_to_row(self, "copied", count, events):
            batch, about = self._batch(count, events).to(self.device).expand(), {}
            if count * events < 10**6:
                shared = self._score(self.arch(self.model.arch), self._batch(count, events))
                about["largest_difference"] = (self._score(self.copying, batch) - shared).abs().max().item()
            score = partial(self._score, Replayed(self.copying, self.spec, self.device))
            self._row("copied", score, batch, count, events, about)

    def _row(
        self, serving: str, score: Callable[..., Tensor], batch: RequestBatch, count: int, events: int, about: Any
    ) -> float | None:
        """The median milliseconds; None if it failed."""
        p50 = None
        with suppressed_to_row(self, serving, count, events):
            times = self._times(lambda: score(batch).cpu())
            p50, p99 = np.quantile(times, (0.5, 0.99)).tolist()
            row = {"p50_ms": p50, "p99_ms": p99, "rounds": len(times), "candidates_per_s": count / p50 * 1e3}
            self._write(serving, count, events, about | row)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return p50

    def _write(self, serving: str, count: int, events: int, row: dict[str, Any]) -> None:
        named = {"model": self.name, "serving": serving, "candidates": count, "events": events}
        rounded = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
        append(self.out / FILE, named | rounded)

    def _score(self, arch: Callable[..., Tensor], batch: RequestBatch) -> Tensor:
        batch = self._moved(batch)
        tokens = self.model.embedding(batch)
        return torch.sigmoid(arch(*scoring_inputs(tokens, batch.candidate_offsets)))

    def _parts(self, arch: Callable[..., Tensor], batch: RequestBatch, events: int, total: float) -> dict[str, float]:
        batch = batch.to(self.device)
        lookup = Replay(lambda *_: self.model.embedding(batch).candidate, True)
        inputs = scoring_inputs(self.model.embedding(batch), batch.candidate_offsets)
        one = self._batch(1, events).to(self.device)
        of_one = scoring_inputs(self.model.embedding(one), one.candidate_offsets)
        medians = [
            float(np.median(self._times(function, 0.2)))
            for function in (lambda: lookup(batch.row), lambda: arch(*of_one), lambda: arch(*inputs))
        ]
        found = {"lookup": medians[0], "user": medians[1], "candidates": medians[2] - medians[1]}
        found["host"] = total - medians[0] - medians[2]
        return {f"{name}_ms": round(value, 4) for name, value in found.items()}

    def _times(self, function: Callable[[], Any], seconds: float = ROW_SECONDS) -> list[float]:
        """Milliseconds of each call, after those in which graphs are captured."""
        for _ in range(4 if self.device.type == "cuda" else 1):
            function()
        times: list[float] = []
        end = time.monotonic() + seconds
        while len(times) < 3 or (len(times) < ROUNDS and time.monotonic() < end):
            self._wait()
            start = time.perf_counter()
            function()
            self._wait()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def net_splitting() -> Iterator[None]:
    """What belongs to a request is copied to its candidates where an operator reads both; one request at a time."""
    compress, attend, mix = lce.linear_compression, target_attention.target_attention, DHENLayer.forward

    def copied(x: Tensor, count: int) -> Tensor:
        return x.expand(count, *x.shape[1:]).contiguous()

    def compressed(candidate: Tensor, request: Any, own: Tensor, above: Any, offsets: Any) -> Tensor:
        if not isinstance(request, Tensor):
            return compress(candidate, request, own, above, offsets)
        count = len(candidate)
        return compress(candidate, copied(request, count), own, above, torch.arange(count + 1, device=own.device))

    def attended(q: Tensor, k: Tensor, v: Tensor, rows: Any, events: Tensor, **sizes: Any) -> Tensor:
        count = torch.arange(len(q) + 1, device=q.device)
        k, v = (copied(each[None], len(q)).flatten(0, 1) for each in (k, v))
        return attend(q, k, v, count, count * events[1], **sizes | {"max_candidates": 1})

    def mixed(self: DHENLayer, candidate: Tensor, request: Tensor | None = None, rows: Any = None) -> Tensor:
        if request is not None:
            request, rows = copied(request, len(candidate)), CandidateRows.identity(len(candidate), candidate.device)
        return mix(self, candidate, request, rows)

    with (
        mock.patch.object(lce, "linear_compression", compressed),
        mock.patch.object(target_attention, "target_attention", attended),
        mock.patch.object(DHENLayer, "forward", mixed),
    ):
        yield


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"stopped after {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@contextmanager
def turn(out: Path) -> Iterator[None]:
    """While no other process measures on this GPU."""
    with (out / f"gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def suppressed_to_row(job: Job, serving: str, count: int, events: int) -> Iterator[None]:
    """One that fails, e.g. for memory, leaves a row that says so, and the others are measured."""
    try:
        yield
    except Exception as error:
        job._write(serving, count, events, {"error": f"{type(error).__name__}: {str(error)[:200]}"})


def work(options: argparse.Namespace, name: str, serving: str, until: float) -> None:
    """In a process of its own. `until`: seconds of `time.time` when it starts measuring, whether or not others are
    ready."""
    out = options.out
    mark = out / f"{name}.{serving}.ready"
    rivals = json.loads((out / "gpus.json").read_text())[mark.name]

    def ready() -> None:
        mark.touch()
        while time.time() < until and not all((out / rival).exists() for rival in rivals):
            time.sleep(0.1)

    try:
        Job(out, name, serving, options).run(ready)
    except Exception as error:
        append(out / FILE, {"model": name, "serving": serving, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        raise
    finally:
        mark.touch()


def measure(options: argparse.Namespace, jobs: list[tuple[str, str]]) -> None:
    out, seconds = options.out, options.seconds
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("*.ready"), *out.glob(FILE)]:
        old.unlink()
    end, gpus = time.time() + seconds, torch.cuda.device_count()
    of_gpu = {job: str(min(gpus - 1, job[1] != "shared")) if gpus else "" for job in jobs}
    marks = {job: f"{job[0]}.{job[1]}.ready" for job in jobs}
    rivals = {marks[job]: [marks[other] for other in jobs if of_gpu[other] == of_gpu[job]] for job in jobs}
    (out / "gpus.json").write_text(json.dumps(rivals))
    processes = []
    for name, serving in jobs:
        share = 0.35 if serving == "shared" else 0.6
        command = [
            sys.executable,
            "-m",
            "tools.latency",
            *sys.argv[1:],
            "--job",
            name,
            serving,
            str(end - seconds * (1 - share)),
        ]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": of_gpu[name, serving], "TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (out / f"{name}.{serving}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.time()))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
    device = torch.cuda.get_device_name() if gpus else "cpu"
    rows = sorted(rows_of(out / FILE), key=lambda row: [str(row.get(key, 0)).rjust(12) for key in ORDER])
    about = {"device": device, "set": options.set, "versions": versions.collect()}
    write_json(out / "latency.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{value}" if name in ORDER else f"{name} {value}" for name, value in row.items()))


ORDER = ("model", "events", "candidates", "serving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--set", nargs="+", default=[], help="keys of the experiments, e.g. model.dim=64")
    parser.add_argument("--candidates", nargs="+", type=int, default=CANDIDATES)
    parser.add_argument("--events", nargs="+", type=int, default=HISTORIES, help="data.max_history of requests")
    parser.add_argument("--only", nargs="+", help="jobs to measure, e.g. gem.shared kunlun.aoti")
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        name, serving, until = options.job
        work(options, name, serving, float(until))
    else:
        measure(options, [job for job in JOBS if options.only is None or ".".join(job) in options.only])


if __name__ == "__main__":
    main()

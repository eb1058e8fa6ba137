"""Latency and throughput of the HTTP application on a CPU: `python -m tools.serving FILE.json [--clients | --load]`.

Fresh models on generated requests: a user with 100 events, and candidates with two ids, a list of tags and two numbers.
Calls go through the ASGI application, from the body to the answer, without a network. One thread of PyTorch a call.
`--clients` compares batches of concurrent calls with calls by themselves: of clients that wait for their answers, and
of calls that come at random, at 70 % of the highest rate that is borne. `--load` has 200 clients for a minute, with a
tenth of their calls wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from modules.config import ModelConfig
from modules.models.baselines import DIN, DLRM
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from modules.pretrained import PretrainedModel
from train.commands.export import export_model
from train.config.schema import EventsConfig, HistoryConfig
from train.data import build_source
from train.process.files import write_json
from train.record import versions
from train.serving.asgi import App
from train.serving.service import Service

EVENTS, ITEMS, USERS = 100, 5000, 40
ROUNDS = 40
CANDIDATES = (10, 100, 1000)
CLIENTS = (1, 16, 64)
BATCHED = (0, 5)
"""Milliseconds that a call waits for others."""
TRIAL, MEASURED = 15, 60
"""Seconds that calls come at a rate, to see whether it is borne, and for its times."""
SHARE = 0.7
"""Of the highest rate that is borne."""
MODELS: dict[str, ModelConfig] = {
    "dlrm": DLRM.Config(dim=32),
    "din": DIN.Config(dim=32),
    "interformer": InterFormer.Config(dim=32),
    "kunlun": Kunlun.Config(dim=32),
}


def rows() -> list[dict[str, Any]]:
    """120 earlier events of each user, two to a second."""
    generator = np.random.default_rng(0)
    count = USERS * 120
    columns = {
        "user": [f"u{index % USERS}" for index in range(count)],
        "item": [f"i{item}" for item in generator.integers(ITEMS, size=count)],
        "shop": [f"s{shop}" for shop in generator.integers(200, size=count)],
        "tags": [[f"t{tag}" for tag in tags] for tags in generator.integers(50, size=(count, 3))],
        "price": generator.exponential(size=count).tolist(),
        "rating": generator.random(count).tolist(),
        "time": (1_700_000_000 + np.arange(count) // (2 * USERS)).tolist(),
        "click": generator.integers(2, size=count).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def export(name: str, folder: Path, data: EventsConfig) -> Service:
    source = build_source(data)
    spec = dataclasses.replace(source.spec, max_candidates=max(CANDIDATES))
    torch.manual_seed(0)
    model = PretrainedModel(MODELS[name], spec).eval()
    export_model(folder, model, source, data, {}, torch.float32)
    return Service.from_pretrained(folder)


async def call(app: App, body: bytes, status: int = 200) -> bytes:
    """The answer. AssertionError for one of another status."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/score", "headers": []}, receive, send)
    assert sent[0]["status"] == status, sent
    return sent[1]["body"]


async def seconds_of(app: App, body: bytes) -> float:
    start = time.perf_counter()
    await call(app, body)
    return time.perf_counter() - start


async def latency(app: App, body: bytes) -> dict[str, float]:
    """Of a call: the time that passes, and that of the processor, on which other work on the host has little effect."""
    for _ in range(5):
        await call(app, body)
    start = time.process_time()
    seconds = [await seconds_of(app, body) for _ in range(ROUNDS)]
    cpu = (time.process_time() - start) / ROUNDS
    wall = {"median_ms": statistics.median(seconds), "p95_ms": float(np.quantile(seconds, 0.95)), "cpu_ms": cpu}
    return {name: 1e3 * value for name, value in wall.items()}


async def throughput(service: Service, threads: int, body: bytes, candidates: int) -> float:
    """Candidates a second with two calls in flight for each thread."""
    app = App(service, threads=threads)
    await call(app, body)

    async def client() -> None:
        for _ in range(ROUNDS // 4):
            await call(app, body)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(2 * threads)))
    return 2 * threads * (ROUNDS // 4) * candidates / (time.perf_counter() - start)


def measure(name: str, service: Service, request: dict[str, Any], pool: list[dict[str, Any]]) -> list[dict[str, Any]]:
    app, found = App(service, threads=1), []
    for count in CANDIDATES:
        asked = {**request, "candidates": pool[:count]}
        body = json.dumps(asked).encode()
        start = time.perf_counter()
        for _ in range(10):
            service.read.batch([asked])
        reading = (time.perf_counter() - start) / 10
        row: dict[str, Any] = {"model": name, "traced": service.scorer.traced, "requests": 1, "candidates": count}
        row |= asyncio.run(latency(app, body)) | {
            "reading_ms": 1e3 * reading,
        }
        row["candidates_per_second"] = {
            threads: asyncio.run(throughput(service, threads, body, count)) for threads in (1, 2)
        }
        found.append(row)
    body = json.dumps([{**request, "candidates": pool[:10]}] * 10).encode()
    row = {"model": name, "traced": service.scorer.traced, "requests": 10, "candidates": 10}
    row |= asyncio.run(latency(app, body))
    row["candidates_per_second"] = {threads: asyncio.run(throughput(service, threads, body, 100)) for threads in (1, 2)}
    return [*found, row]


async def closed_loop(service: Service, body: bytes, clients: int, calls: int, wait: int) -> tuple[list[float], ...]:
    """(seconds of each call, [seconds of all, processor seconds]) of clients that call again once they are answered."""
    app = App(service, most_waiting=clients, batch_milliseconds=wait)

    async def client() -> list[float]:
        return [await seconds_of(app, body) for _ in range(calls)]

    await asyncio.gather(*(call(app, body) for _ in range(clients)))
    start = time.perf_counter(), time.process_time()
    found = await asyncio.gather(*(client() for _ in range(clients)))
    return np.concatenate(found).tolist(), [time.perf_counter() - start[0], time.process_time() - start[1]]


def concurrent(service: Service, body: bytes) -> Iterator[dict[str, float]]:
    """Batched and not take turns: other work on the host is on both."""
    for clients in CLIENTS:
        rounds: dict[int, list[Any]] = {wait: [] for wait in BATCHED}
        for _ in range(5):
            for wait, found in rounds.items():
                found.append(asyncio.run(closed_loop(service, body, clients, max(2, 60 // clients), wait)))
        for wait, found in rounds.items():
            calls = np.concatenate([seconds for seconds, _ in found])
            wall, cpu = np.sum([totals for _, totals in found], axis=0).tolist()
            p50, p99 = (1e3 * np.quantile(calls, (0.5, 0.99))).tolist()
            row = {"clients": clients, "batch_milliseconds": wait, "calls": len(calls), "p50_ms": p50, "p99_ms": p99}
            yield row | {"calls_per_second": len(calls) / wall, "cpu_ms": 1e3 * cpu / len(calls)}


def used() -> float:
    """Seconds that the host's processors have worked."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


async def arrivals(service: Service, body: bytes, rate: float, seconds: float, wait: int) -> dict[str, float]:
    """Calls that come at random, `rate` a second, whether others are answered or not. Times are from when one is due;
    `open` are those without an answer when the last one has come, and `others` the processors that other work took."""
    app = App(service, most_waiting=1 << 20, batch_milliseconds=wait)
    due = np.cumsum(np.random.default_rng(0).exponential(1 / rate, round(rate * seconds)))
    before, own, start = used(), time.process_time(), time.perf_counter()
    times: list[float] = []

    async def one(moment: float) -> None:
        await call(app, body)
        times.append(time.perf_counter() - start - moment)

    calls = []
    for moment in due.tolist():
        await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
        calls.append(asyncio.create_task(one(moment)))
    left = len(calls) - len(times)
    await asyncio.gather(*calls)
    wall, cpu = time.perf_counter() - start, time.process_time() - own
    p50, p99 = (1e3 * np.quantile(times, (0.5, 0.99))).tolist()
    found = {"arrivals_per_second": rate, "seconds": seconds, "batch_milliseconds": wait, "calls": len(calls)}
    found |= {"open": left, "p50_ms": p50, "p99_ms": p99, "cpu_ms": 1e3 * cpu / len(calls)}
    return found | {"others": (used() - before - cpu) / wall}


def highest(service: Service, body: bytes, wait: int) -> float:
    """The most calls a second, to 5 %, of which less than a second's are open after `TRIAL` seconds."""

    def borne(rate: float) -> bool:
        return asyncio.run(arrivals(service, body, rate, TRIAL, wait))["open"] < rate

    rate = 8.0
    while borne(2 * rate):
        rate *= 2
    for step in (2**0.5, 2**0.25, 2**0.125, 2**0.0625):
        rate *= step if borne(rate * step) else 1
    return rate


def borne(service: Service, body: bytes) -> Iterator[dict[str, float]]:
    for wait in BATCHED:
        most = highest(service, body, wait)
        yield {"highest": most} | asyncio.run(arrivals(service, body, SHARE * most, MEASURED, wait))


async def load(service: Service, request: dict[str, Any], seconds: float = 60, clients: int = 200) -> dict[str, Any]:
    """Answers by status, and MiB of memory in use after each sixth of the time."""
    app = App(service, most_waiting=clients, batch_milliseconds=5)
    (expected,), good, wrong = service([request]), json.dumps(request).encode(), json.dumps(request | {"time": "now"})
    answered, times, memory, begun = Counter[str](), list[float](), list[float](), 0

    async def client(number: int, end: float) -> None:
        nonlocal begun
        body, status, says = (wrong.encode(), 400, "time='now'") if number % 10 == 0 else (good, 200, "")
        while (start := time.perf_counter()) < end:
            begun += 1
            said = json.loads(await call(app, body, status))
            times.append(time.perf_counter() - start)
            right = says in said["error"] if says else np.allclose(said["predictions"][0]["click"], expected["click"])
            answered[f"{status}" if right else "wrong"] += 1

    for _ in range(6):
        end = time.perf_counter() + seconds / 6
        await asyncio.gather(*(client(number, end) for number in range(clients)))
        memory.append(
            round(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
        )
    p50, p99 = (1e3 * np.quantile(times, (0.5, 0.99))).tolist()
    about = {"clients": clients, "seconds": seconds, "batch_milliseconds": 5, "begun": begun}
    return about | {"answered": dict(answered), "memory_mib": memory, "p50_ms": p50, "p99_ms": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--clients", action="store_true")
    mode.add_argument("--load", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, table = os.getloadavg()[0], rows()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pq.write_table(pa.Table.from_pylist(table), folder / "rows.parquet")
        data = EventsConfig(
            root=scratch, cache_dir=f"{scratch}/cache", files=["rows.parquet"], user="user", time="time",
            labels={"click": "click"}, request_categorical=["user"], candidate_categorical=["item", "shop"],
            candidate_list=["tags"], candidate_numeric=["price", "rating"], max_history=EVENTS,
            histories={"seen": HistoryConfig(["item", "shop"])}, request_window=1,
        )  # fmt: skip
        own = [row for row in table if row["user"] == "u0"]
        request = {"request": {"user": "u0"}, "histories": {"seen": own}, "time": 1_700_100_000}
        found = []
        for name in ("interformer",) if options.load else ("dlrm", "interformer") if options.clients else MODELS:
            service = export(name, folder / name, data)
            if options.clients:
                body = json.dumps({**request, "candidates": table[:10]}).encode()
                found += [{"model": name, "candidates": 10} | row for row in concurrent(service, body)]
                if name == "interformer":
                    found += [{"model": name, "candidates": 10} | row for row in borne(service, body)]
            elif options.load:
                found.append({"model": name} | asyncio.run(load(service, {**request, "candidates": table[:10]})))
            else:
                found += measure(name, service, request, table[: max(CANDIDATES)])
            print(json.dumps(found[-6:], indent=1))
    about = {"processor": platform.processor() or platform.machine(), "threads_of_pytorch": 1, "load_before": before}
    write_json(options.out, about | {"versions": versions.collect(), "width": 32, "events": EVENTS, "rows": found})


if __name__ == "__main__":
    main()

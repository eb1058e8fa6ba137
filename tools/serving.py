"""Latency and throughput of the HTTP application on a CPU: `python -m tools.serving FILE.json`.

Fresh models on generated requests: a user with 100 events, and candidates with two ids, a list of tags and two numbers.
Calls go through the ASGI application, from the body to the answer, without a network. One thread of PyTorch a call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
import statistics
import sys
import tempfile
import time
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


async def call(app: App, body: bytes) -> float:
    """Seconds of one call."""
    start = time.perf_counter()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    await app({"type": "http", "method": "POST", "path": "/score", "headers": []}, receive, send)
    return time.perf_counter() - start


async def latency(app: App, body: bytes) -> dict[str, float]:
    """Of a call: the time that passes, and that of the processor, on which other work on the host has little effect."""
    for _ in range(5):
        await call(app, body)
    start = time.process_time()
    seconds = [await call(app, body) for _ in range(ROUNDS)]
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


def main(out: Path) -> None:
    torch.set_num_threads(1)
    table = rows()
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
        for name in MODELS:
            found += measure(name, export(name, folder / name, data), request, table[: max(CANDIDATES)])
            print(json.dumps(found[-4:], indent=1))
    about = {"processor": platform.processor() or platform.machine(), "threads_of_pytorch": 1}
    write_json(out, about | {"versions": versions.collect(), "width": 32, "events": EVENTS, "rows": found})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

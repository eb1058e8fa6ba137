"""Prepared rows, and exports of small models for them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from modules.batch import RequestBatch
from modules.config import ModelConfig
from modules.pretrained import PretrainedModel
from train.commands.export import export_model
from train.config.schema import EventsConfig, HistoryConfig
from train.data import build_source
from train.data.source import Source

COUNT = 240
START = 1_700_000_000
MOST = 12
"""Candidates of a request."""


@dataclass
class Rows:
    """Rows of a file, and the source that was prepared from them."""

    rows: list[dict[str, Any]]
    config: EventsConfig
    source: Source

    def request(self, number: int, most: int = MOST) -> dict[str, Any]:
        """A request of the training split as a service gets it."""
        batch = self.source.batch("train", np.array([number]))
        asked = [self.rows[row] for row in batch.row.tolist()][:most]
        own = [row for row in self.rows if row["user"] == asked[0]["user"]]
        histories: dict[str, Any] = {"seen": own}
        if "recent" in self.config.histories:
            histories["recent"] = [{"recent": item} for item in asked[0]["recent"]]
        return {"request": asked[0], "candidates": asked, "histories": histories, "time": int(batch.request_time[0])}

    def batch(self, numbers: list[int]) -> RequestBatch:
        return self.source.batch("train", np.array(numbers))


def _rows() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    items = generator.integers(20, size=(COUNT, 5)).astype(str)
    lengths = generator.integers(5, size=COUNT).tolist()
    columns = {
        "user": generator.integers(5, size=COUNT).astype(str).tolist(),
        "country": generator.choice(["de", "fr"], size=COUNT).tolist(),
        "item": items[:, 0].tolist(),
        "tags": [[f"t{tag}" for tag in generator.integers(5, size=size)] for size in generator.integers(3, size=COUNT)],
        "recent": [row[1 : 1 + length].tolist() for row, length in zip(items, lengths, strict=True)],
        "price": [None if value < 0.2 else value for value in generator.exponential(size=COUNT).tolist()],
        "time": (START + np.repeat(np.arange(COUNT // 2) * 1000, 2)).tolist(),
        "click": generator.integers(2, size=COUNT).tolist(),
        "like": generator.integers(2, size=COUNT).tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _prepared(folder: Path, **settings: Any) -> Rows:
    folder.mkdir()
    rows = _rows()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    config = EventsConfig(
        root=str(folder), cache_dir=str(folder / "cache"), files=["rows.parquet"], user="user", time="time",
        request_window=1, max_history=6, statistics="none", **settings,
    )  # fmt: skip
    return Rows(rows, config, build_source(config))


@pytest.fixture(scope="session")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Features of every kind, and histories of a log and of lists without times."""
    return _prepared(
        tmp_path_factory.mktemp("ranking") / "data",
        labels={"click": "click", "like": "like"},
        request_categorical=["user", "country"],
        candidate_categorical=["item"],
        candidate_list=["tags"],
        candidate_numeric=["price"],
        tables={"recent": "item"},
        histories={
            "seen": HistoryConfig(["item"]),
            "recent": HistoryConfig(["recent"], lists=True),
        },
    )


@pytest.fixture(scope="session")
def next_items(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What next-item models take: candidates that are one id, and one history of such ids."""
    return _prepared(
        tmp_path_factory.mktemp("next_items") / "data",
        labels={"click": "click"},
        request_categorical=["user"],
        candidate_categorical=["item"],
        histories={"seen": HistoryConfig(["item"])},
    )


Exported = tuple[Path, PretrainedModel]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelConfig, Rows], Exported]:
    """Exports a fresh model, each configuration once."""
    done: dict[str, Exported] = {}

    def export(config: ModelConfig, rows: Rows) -> Exported:
        key = json.dumps([dataclasses.asdict(config), rows.config.root])
        if key not in done:
            torch.manual_seed(0)
            spec = dataclasses.replace(rows.source.spec, max_candidates=MOST)
            model = PretrainedModel(config, spec).eval()
            folder = tmp_path_factory.mktemp(config.name.replace(".", "_")) / "export"
            export_model(folder, model, rows.source, rows.config, {}, torch.float32)
            done[key] = folder, model
        return done[key]

    return export


@pytest.fixture
def own_models(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module `served_models` of somebody's own, from which Python imports."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "served_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    return folder


OWN = """
from torch import nn


class Dot(nn.Module):
    def __init__(self, spec, dim, dropout, reads=False):
        super().__init__()
        self.tasks = nn.Linear(dim, len(spec.tasks))
        self.reads = reads

    def forward(self, tokens, batch):
        product = tokens.request.mean(1)[batch.owner] * tokens.candidate.mean(1)
        if self.reads and product.sum().item() > 1e30:
            product = product / 2
        return self.tasks(product)

    def aux_loss(self):
        return self.tasks.bias.new_zeros(())
"""

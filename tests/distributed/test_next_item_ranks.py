"""Losses over two ranks with unequal rows are those of one process; so are places in a catalogue of a sharded table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pyarrow.parquet as pq
import pytest
import torch

from modules.loss import TaskLosses
from modules.loss.next_item import ItemShares
from modules.models.retrieval import NextItems
from tests.modules.factories import random_batch, random_spec
from tests.processes import run_ranks
from train.build import build
from train.commands import vectors
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config, RuntimeConfig
from train.evaluate import catalogue, evaluate_split, split_loader
from train.process import distributed
from train.trainer import Trainer

TASKS = ("click", "rating", "order")
CONFIG = {"rating": {"loss": "huber"}, "order": {"loss": "pairwise"}}


def _task_losses(folder: Path) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    spec = random_spec(tasks=TASKS)
    losses = TaskLosses(CONFIG, TASKS)
    batches = [random_batch(spec, candidates=[3, 2], seed=1), random_batch(spec, candidates=[0, 1, 4, 2], seed=2)]
    logits = [torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.randn(7, 3)]
    mine = batches[world.rank]
    logits[1] = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    loss, weight = losses(logits[world.rank], mine, spec, None)
    places = _items(world.rank)
    next_loss = TaskLosses({"next": {"loss": "softmax", "uniform": 4}}, ("next",))
    next_loss.known = ItemShares(20)
    of_next, _ = next_loss(places, mine, spec, None)
    (folder / f"{world.rank}.json").write_text(json.dumps([loss.item(), of_next.item(), weight.item()]))
    distributed.stop()


def _items(rank: int) -> NextItems:
    generator = torch.Generator().manual_seed(rank)
    count = 3 + 4 * rank
    query, target = (torch.randn(count, 2, generator=generator) for _ in range(2))
    ids = torch.randint(1, 20, (count,), generator=generator)
    candidates = torch.randn(4, 2, generator=torch.Generator().manual_seed(7))
    return NextItems(query, target, ids, torch.rand(count, generator=generator), candidates, torch.tensor([3, 9, 1, 4]))


def test_losses_of_two_ranks_are_those_of_all_rows(tmp_path: Path) -> None:
    run_ranks(_task_losses, 2, tmp_path)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    spec = random_spec(tasks=TASKS)
    losses = TaskLosses(CONFIG, TASKS)
    batches = [random_batch(spec, candidates=[3, 2], seed=1), random_batch(spec, candidates=[0, 1, 4, 2], seed=2)]
    logits = [torch.randn(n, 3, generator=torch.Generator().manual_seed(s)) for n, s in ((5, 1), (7, 2))]
    merged = random_batch(spec, candidates=[3, 2, 0, 1, 4, 2], seed=3)
    merged.labels.copy_(torch.cat([batch.labels for batch in batches]))
    loss, weight = losses(torch.cat(logits), merged, spec, None)
    assert np.isclose(np.mean([each[0] for each in told]), loss.item(), rtol=1e-5)
    assert np.isclose(told[0][2], weight.item(), rtol=1e-5)
    parts = [_items(0), _items(1)]
    whole = NextItems(*(torch.cat(pair) for pair in zip(*(part[:4] for part in parts), strict=True)), *parts[0][4:])
    next_loss = TaskLosses({"next": {"loss": "softmax", "uniform": 4}}, ("next",))
    next_loss.known = ItemShares(20)
    expected = next_loss(whole, merged, spec, None)[0].item()
    assert np.isclose(np.mean([each[1] for each in told]), expected, rtol=1e-5)


def _config(root: Path, dense: str, score: str, rank_seen: bool) -> Config:
    overrides = [
        "+experiment=ml1m_sasrec", f"data.root={root}", f"data.cache_dir={root}/cache", "data.max_history=6",
        "data.batch_size=8", "data.eval_batch_size=5", "model.dim=8", "model.feed_forward_dim=8",
        "tasks.next.uniform=8", "optimizer.sparse=rowwise_adagrad", "precision=fp32", "runtime.epochs=2",
        "runtime.eval_epochs=2",
        f"runtime.run_dir={root}/run", "runtime.device=cpu", "runtime.threads=1", "parallel.sharding_types=[row_wise]",
        f"parallel.dense={dense}", f"model.score={score}", "model.temperature=0.5",
        f"tracking.rank_seen={rank_seen}",
    ]  # fmt: skip
    return to_config(composed(overrides))


def _train_and_rank(root: Path, dense: str, score: str, rank_seen: bool) -> None:
    config = _config(root, dense, score, rank_seen)
    catalogue.CHUNK, catalogue.BLOCK, vectors.CHUNK = 7, 3, 5
    world = distributed.start(config.runtime)
    results = Trainer(config, world).run()
    job = build(config, world)
    values, _ = evaluate_split(job, "test", root / "ranks")
    lists = [_by_hand(job, batch) for batch in split_loader(job, "test")]
    rows: dict[str, Any] = {str(row): rank for each in lists for row, rank in each.items()}
    (root / f"{world.rank}.json").write_text(json.dumps([results["test"], values, rows, _write_vectors(job, root)]))
    distributed.stop()


def _write_vectors(job: Any, root: Path) -> list[tuple[int, float]]:
    """Row and logit of each of this rank's test candidates."""
    with torch.no_grad():
        for name in ("items", "rows"):
            with vectors.VectorWriter(root / "vectors" / name, job, "vector", {}) as writer:
                vectors.write_rows(job, "item", writer, scored=name == "items")
        with vectors.VectorWriter(root / "vectors" / "requests", job, "vector", {}) as writer:
            vectors.write_requests(job, ["test"], [], writer)
        scores = [(batch.row.tolist(), job.model(batch)[:, 0].tolist()) for batch in split_loader(job, "test")]
    return [pair for rows, logits in scores for pair in zip(rows, logits, strict=True)]


def _by_hand(job: Any, batch: Any) -> dict[int, int]:
    """Row -> place of the target among all items that count, by sorting. Looks up all items."""
    with torch.no_grad():
        job.model.eval()
        items = catalogue.catalogue_items(job, 1, catalogue.num_rows(job))
        query = catalogue.vectors(job, batch).queries
    scores = query @ items.T
    histories = batch.histories["rated.item"].values().split(batch.histories["rated.item"].lengths().tolist())
    found = {}
    for row, target, of_items, seen in zip(
        batch.row.tolist(), batch.candidate_sparse.values().tolist(), scores, histories, strict=False
    ):
        own = of_items[target - 1].item()
        others = of_items.clone()
        if not job.config.tracking.rank_seen:
            others[seen - 1] = -torch.inf
        found[row] = 1 + int((others > own).sum()) if target else 0
    return found


@pytest.mark.parametrize(("dense", "score", "rank_seen"), [("ddp", "cosine", False), ("fsdp", "dot", True)])
def test_places_in_the_catalogue_are_those_of_sorting_all_items(
    tmp_path: Path, dense: str, score: str, rank_seen: bool
) -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(3, 12, 30)
    users = np.repeat(np.arange(30), counts)
    table = {
        "user": users,
        "item": generator.integers(1, 25, len(users)),
        "position": np.concatenate([np.arange(n) for n in counts]),
        "rating": np.ones(len(users)),
    }
    pq.write_table(pa.table(table), tmp_path / "ratings.parquet")
    run_ranks(_train_and_rank, 2, tmp_path, dense, score, rank_seen)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0][0] == told[1][0]
    assert told[0][1] == told[1][1]
    assert 0 < told[0][0]["next/mrr"] < 1
    ranks = {int(row): rank for each in told for row, rank in each[2].items()}
    assert len(ranks) == 30
    values = told[0][1]
    places = np.array([rank if rank else np.inf for rank in ranks.values()])
    assert np.isclose(values["next/mrr"], (1 / places).mean())
    for k in (1, 10):
        assert np.isclose(values[f"next/mrr@{k}"], np.where(places <= k, 1 / places, 0).mean())
        assert np.isclose(values[f"next/hr@{k}"], (places <= k).mean())
        assert np.isclose(values[f"next/ndcg@{k}"], np.where(places <= k, 1 / np.log2(places + 1), 0).mean())
    written = parquet.read_table(tmp_path / "ranks").to_pydict()
    assert {row: rank for row, rank in zip(written["row"], written["next_rank"], strict=True) if rank == rank} == {
        row: rank for row, rank in ranks.items() if rank
    }
    logits = {row: logit for each in told for row, logit in each[3]}
    _check_vectors(tmp_path / "vectors", table, logits, cosine=score == "cosine")


def _check_vectors(folder: Path, table: dict[str, np.ndarray], logits: dict[int, float], *, cosine: bool) -> None:
    """Products of written vectors are the model's scores."""
    items, rows, requests = (parquet.read_table(folder / name).to_pydict() for name in ("items", "rows", "requests"))
    own, scored = np.array(rows["vector"]), np.array(items["vector"])
    assert rows["id"] == items["id"]
    assert np.allclose(scored, own / np.linalg.norm(own, axis=1, keepdims=True) if cosine else own)
    known = {str(item) for item in table["item"]}
    assert len(items["id"]) == len(set(items["id"])) <= len(known)
    assert set(items["id"]) <= known
    item_of = dict(zip(items["id"], scored, strict=True))
    assert len(requests["rows"]) == len(logits) == 30
    for user, (row,), query in zip(requests["user"], requests["rows"], np.array(requests["vector"]), strict=True):
        assert user == str(table["user"][row])
        if (item := str(table["item"][row])) in item_of:
            assert np.isclose(query @ item_of[item], logits[row], rtol=1e-4, atol=1e-5)  # float32, 8 products

"""Recall and NDCG of requests with several targets, from rows on disk: a user's test rows are one request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from modules.batch import RequestBatch
from tools.datasets import gowalla
from tools.quality.run import configuration
from train.build import Job, build
from train.evaluate import catalogue, evaluate_split, split_loader
from train.process import distributed


def test_recall_and_ndcg_of_a_users_test_rows_leave_out_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    items = [generator.permutation(25) for _ in range(12)]  # of each user: none twice
    folder = tmp_path / "data" / "gowalla"
    folder.mkdir(parents=True)
    for split, part in {"train": slice(0, 5), "valid": slice(5, 6), "test": slice(6, 9)}.items():
        rows = [[user, *own[part]] for user, own in enumerate(items)]
        (folder / f"{split}.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))
    monkeypatch.setattr(gowalla, "SIZES", {"train": 60, "valid": 12, "test": 36})
    gowalla.prepare(tmp_path, tmp_path)
    config = configuration(
        [
            "+experiment=gowalla_two_tower", f"data.root={tmp_path}", f"data.cache_dir={tmp_path}/cache",
            "data.eval_batch_size=5", "data.num_workers=0", "model.dim=8", "optimizer.sparse=rowwise_adagrad",
            "runtime.device=cpu", "tracking.top_k=[1,4]",
        ]
    )  # fmt: skip
    world = distributed.start(config.runtime)
    try:
        job = build(config, world)
        values, _ = evaluate_split(job, "test", tmp_path / "ranks")
        found = [_recall_and_ndcg(job, batch, 4) for batch in split_loader(job, "test")]
    finally:
        distributed.stop()
    expected = np.concatenate(found).mean(0)
    assert values["next/examples"] == 36
    assert np.allclose([values["next/recall@4"], values["next/ndcg@4"]], expected)
    ranks = pa.concat_tables(pq.read_table(file) for file in sorted((tmp_path / "ranks").glob("*.parquet")))
    assert ranks.num_rows == 36
    assert len(np.unique(ranks["request"].to_numpy())) == 12


def _recall_and_ndcg(job: Job, batch: RequestBatch, k: int) -> np.ndarray:
    """[R, 2] by sorting all items without those of the history."""
    assert batch.num_requests <= 5
    assert batch.num_candidates == 3 * batch.num_requests
    assert batch.histories.lengths().tolist() == [6] * batch.num_requests  # training and validation rows
    job.model.eval()
    with torch.no_grad():
        items = catalogue.catalogue_items(job, 1, catalogue.num_rows(job))
        scores = catalogue.vectors(job, batch).queries @ items.T
    targets = batch.candidate_sparse.values().view(-1, 3)
    seen = batch.histories.values().view(-1, 6)
    rows = []
    for own, wanted, known in zip(scores, targets, seen, strict=True):
        own[known[known > 0] - 1] = -torch.inf
        best = (own.argsort(descending=True)[:k] + 1).tolist()
        hits = [place for place, item in enumerate(best) if item in wanted.tolist()]
        ideal = sum(1 / np.log2(place + 2) for place in range(min(3, k)))
        rows.append([len(hits) / 3, sum(1 / np.log2(place + 2) for place in hits) / ideal])
    return np.array(rows)

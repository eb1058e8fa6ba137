"""Generated logs: their probabilities are those of their labels, and configurations read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from tools.datasets import business_logs
from tools.quality.reachable import PRIOR, popularity
from train.config.compose import to_config
from train.config.files import composed
from train.data import build_source

ROWS = 20_000
TASKS = {"shop": ("click", "cart", "purchase"), "news": ("click", "read"), "video": ("finish", "like")}


@pytest.mark.parametrize("kind", sorted(business_logs.KINDS))
def test_labels_are_drawn_with_the_probabilities_and_the_configuration_reads_them(kind: str, tmp_path: Path) -> None:
    assert business_logs.main([kind, "--to", str(tmp_path), "--impressions", str(ROWS)]) == 0
    log = {name: column.to_numpy() for name, column in zip(*_columns(tmp_path / "log.parquet"), strict=True)}
    assert len(log["time"]) == pytest.approx(ROWS, rel=0.05)
    assert (np.diff(log["time"]) >= 0).all()
    for task in TASKS[kind]:
        p, label = log[f"p_{task}"], log[task]
        # A purchase counts for a week, by which the last ones of an impression are late.
        late = 3e-3 if task == "purchase" else 0
        for low, high in ((0, 0.05), (0.05, 0.3), (0.3, 1)):
            chosen = (p >= low) & (p < high)
            error = np.sqrt((p * (1 - p))[chosen].sum()) / max(chosen.sum(), 1)
            assert abs(label[chosen].mean() - p[chosen].mean()) < 5 * error + late
        popular = popularity(log["item"], log["time"], label.astype(float), label.mean())
        assert 0.5 < roc_auc_score(label, popular) < roc_auc_score(label, p) - 0.05
    overrides = [f"data={kind}_log", f"data.root='{tmp_path}'", f"data.cache_dir='{tmp_path}/cache'"]
    source = build_source(to_config(composed(overrides)).data)
    assert source.spec.tasks == TASKS[kind]
    batch = source.batch("test", np.arange(source.num_requests("test")))
    assert all(batch.histories.lengths().view(len(batch.histories.keys()), -1).sum(1) > 0)


def test_popularity_is_of_earlier_seconds() -> None:
    generator = np.random.default_rng(0)
    item, time = generator.integers(4, size=60), generator.integers(20, size=60)
    label = np.where(generator.random(60) < 0.2, np.nan, generator.integers(2, size=60))
    for row, found in enumerate(popularity(item, time, label, 0.3)):
        earlier = label[(item == item[row]) & (time < time[row]) & ~np.isnan(label)]
        assert found == pytest.approx((earlier.sum() + PRIOR * 0.3) / (len(earlier) + PRIOR))


def _columns(file: Path) -> tuple[list[str], list]:
    table = pq.read_table(file)
    return table.column_names, table.columns

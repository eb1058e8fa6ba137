"""The gradient-boosted baseline: what rows become, and that its run directory is one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.sources import events_config
from train.commands import baseline, segments
from train.config.schema import HistoryConfig
from train.data import build_source
from train.data.flat import FlatFeatures
from train.metrics.predictions import read_predictions

ROWS = 3000


def table_of() -> dict:
    """Clicks depend on whether the user has clicked the item's brand before, and on the price."""
    generator = np.random.default_rng(0)
    user, brand = generator.integers(40, size=ROWS), generator.integers(5, size=ROWS)
    price, clicks = generator.normal(size=ROWS), np.zeros(ROWS, int)
    liked = np.zeros((40, 5))
    for row in range(ROWS):
        logit = 1.5 * (liked[user[row], brand[row]] > 0) - 2 * price[row] - 0.5
        clicks[row] = generator.random() < 1 / (1 + np.exp(-logit))
        liked[user[row], brand[row]] += clicks[row]
    return {
        "user": user,
        "time": np.arange(ROWS) * 100,
        "item": brand * 10 + generator.integers(10, size=ROWS),
        "brand": brand,
        "tags": [[str(one), "all"] if one else None for one in brand],
        "price": price,
        "click": pa.array(clicks, mask=generator.random(ROWS) < 0.05),
    }


def overrides(folder: Path) -> list[str]:
    pq.write_table(pa.table(table_of()), folder / "log.parquet")
    return [
        "data=events",
        f"data.root='{folder}'",
        f"data.cache_dir='{folder}/cache'",
        "data.files=[log.parquet]",
        "data.user=user",
        "data.time=time",
        "+data.labels={click: click}",
        "data.request_categorical=[user]",
        "data.candidate_categorical=[item,brand]",
        "data.candidate_list=[tags]",
        "data.candidate_numeric=[price]",
        "+data.histories={clicked: {fields: [item, brand], where: {click: 1}}}",
    ]


def test_columns_are_what_the_rows_say(tmp_path: Path) -> None:
    table = table_of()
    pq.write_table(pa.table(table), tmp_path / "log.parquet")
    histories = {"clicked": HistoryConfig(["item", "brand"], where={"click": 1})}
    source = build_source(
        events_config(
            tmp_path,
            files=["log.parquet"],
            candidate_categorical=["item", "brand"],
            candidate_list=["tags"],
            candidate_numeric=["price"],
            histories=histories,
            max_history=ROWS,
        )
    )
    batches = list(baseline.batches(source, "train"))
    features = FlatFeatures(source.spec, batches, most_categories=20)
    assert features.categories == {"brand": source.spec.tables["brand"]}
    batch = source.batch("test", np.arange(source.num_requests("test")))
    found = dict(zip(features.names, features.rows(batch).T, strict=True))
    training = np.concatenate([batch.row.numpy() for batch in batches])
    click, owner = table["click"].to_pylist(), batch.owner.numpy()
    clicked = np.array([one == 1 for one in click])
    np.testing.assert_allclose(found["price"], batch.candidate_dense[:, 0])
    for place, row in enumerate(batch.row.tolist()):
        now = batch.request_time[owner[place]].item()
        earlier = clicked & (table["user"] == table["user"][row]) & (table["time"] < now)
        same = np.flatnonzero(earlier & (table["brand"] == table["brand"][row]))
        assert found["clicked events"][place] == earlier.sum()
        assert found["clicked.brand = brand"][place] == len(same)
        since = np.log1p(now - table["time"][same].max()) if len(same) else np.nan
        np.testing.assert_allclose(found["clicked.brand = brand since"][place], since, rtol=1e-6)
        assert found["item rows"][place] == (table["item"][training] == table["item"][row]).sum()
        assert found["tags length"][place] == (2 if table["brand"][row] else 0)
    assert np.ptp(found["tags 1"]) == 1


def test_run_directory_is_as_that_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("lightgbm")
    run_dir = tmp_path / "run"
    arguments = [*overrides(tmp_path), f"runtime.run_dir='{run_dir}'", "--rate", "0.1", "--least", "20", "--leaves=15"]
    results = baseline.main(arguments)
    assert results["test"]["click/auc"] > 0.75
    assert results["best_ne"] == results["valid"]["click/ne"] < 0.9
    assert next(iter(results["gain"]["click"])) in ("price", "clicked.brand = brand")
    predictions = read_predictions(run_dir / "predictions" / "test")
    assert len(predictions["row"]) == results["test"]["click/examples"] + np.isnan(predictions["click_label"]).sum()
    assert json.loads((run_dir / "results.json").read_text())["trees"] == results["trees"]
    found = segments.main([f"run_dir={run_dir}", "by=brand", f"against={run_dir}", "resamples=5"])
    assert found[0]["metrics"]["click/auc"] == pytest.approx(results["test"]["click/auc"])
    assert found[0]["gaps"]["click/auc"] == 0
    assert baseline.main(arguments)["test"] == results["test"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--leaves=1", "1 must be at least 2"),
        ("--rate=2", "--rate 2.0 must be above 0"),
        ("--trees=x", "trees"),
    ],
)
def test_wrong_options_are_named(option: str, words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        baseline.main(["data=movielens", option])
    assert words in capsys.readouterr().err


def test_runs_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds a run"):
        baseline.main(["data=movielens", f"runtime.run_dir='{tmp_path}'"])

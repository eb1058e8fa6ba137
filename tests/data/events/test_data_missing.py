"""Missing numbers and labels: NaN where the configuration expects it, fills and indicators, and what is masked."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from modules.loss import ranking_loss
from tests.data.events.test_data_events import make_config, make_table
from tests.data.sources import whole
from train.config.schema import JoinConfig
from train.data import build_source
from train.data.reader import RequestReader
from train.data.summary import summarise
from train.metrics import MetricSet

COUNT = 200
NUMERIC = {"candidate_numeric": ["price", "age"], "missing_nan": ["*"]}


def table_with_gaps(gap: float | None = math.nan) -> dict:
    """Numbers and conversions with gaps; a conversion is known for clicked rows alone."""
    generator = np.random.default_rng(1)
    table = make_table(COUNT, age=generator.normal(size=COUNT))
    unknown = generator.random(COUNT) < 0.2
    table["price"] = [gap if missing else value for missing, value in zip(unknown, table["price"], strict=True)]
    bought = generator.integers(2, size=COUNT)
    table["buy"] = [float(b) if clicked else gap for b, clicked in zip(bought, table["click"], strict=True)]
    return table


def lacks(column: list) -> np.ndarray:
    return np.array([value is None or math.isnan(value) for value in column])


def test_nan_is_an_error_unless_the_column_is_said_to_have_it(tmp_path):
    price = r"column 'price' is nan, expected .*data\.missing_nan=\[price\] takes NaN for nothing"
    with pytest.raises(ValueError, match=price):
        build_source(make_config(tmp_path, table_with_gaps(), candidate_numeric=["price"]))
    labels = {"click": "click", "buy": "buy"}
    with pytest.raises(ValueError, match="column 'buy' is nan, expected"):
        build_source(make_config(tmp_path, table_with_gaps(), labels=labels, **NUMERIC | {"missing_nan": ["price"]}))
    table = table_with_gaps()
    table["age"][3] = math.inf
    with pytest.raises(ValueError, match=r"row 4: column 'age' is inf, expected a finite number or nothing;"):
        build_source(make_config(tmp_path, table, labels=labels, **NUMERIC))


@pytest.mark.parametrize("written", ["parquet", "csv", "joined"])
def test_nan_gives_the_batches_of_null(tmp_path, written):
    labels = {"click": "click", "buy": "buy >= 1"}
    expected = build_source(make_config(tmp_path, table_with_gaps(None), labels=labels, **NUMERIC))
    (tmp_path / "nan").mkdir()
    config = make_config(tmp_path / "nan", table_with_gaps(), labels=labels, **NUMERIC)
    parquet = pq.read_table(tmp_path / "nan" / "events.parquet")
    if written == "csv":
        csv.write_csv(parquet, tmp_path / "nan" / "events.csv")
        assert ",nan" in (tmp_path / "nan" / "events.csv").read_text()
        config.files = ["events.csv"]
    if written == "joined":
        number = np.arange(COUNT)
        pq.write_table(parquet.append_column("row", [number]).drop(["price"]), tmp_path / "nan" / "events.parquet")
        pq.write_table(parquet.select(["price"]).append_column("row", [number]), tmp_path / "nan" / "prices.parquet")
        config.joins = [JoinConfig(["prices.parquet"], "row")]
    source = build_source(config)
    assert source.fingerprint == expected.fingerprint
    for name in ("candidate_dense", "labels"):
        torch.testing.assert_close(
            getattr(whole(source), name), getattr(whole(expected), name), rtol=0, atol=0, equal_nan=True
        )
    assert source.missing() == expected.missing()


def test_unknown_labels_are_in_no_loss_and_no_metric_of_their_task(tmp_path):
    table = table_with_gaps()
    source = build_source(make_config(tmp_path, table, labels={"click": "click", "buy": "buy"}, missing_nan=["buy"]))
    batch = whole(source)
    row = batch.row.numpy()
    unknown = torch.from_numpy(lacks(table["buy"])[row])
    assert batch.labels[:, 1].isnan().equal(unknown)
    assert source.missing()["buy"] == pytest.approx(1 - np.mean(table["click"][row]))
    assert source.label_rates()["buy"] == pytest.approx(np.nanmean(np.array(table["buy"])[row]))
    assert f"training rows without a label: buy {100 * source.missing()['buy']:.3g} %" in summarise(source)[0]

    logits = torch.randn(len(row), 2, requires_grad=True)
    ranking_loss(logits, batch.labels, batch.weights)[0].backward()
    assert logits.grad is not None
    assert (logits.grad[unknown, 1] == 0).all()
    assert (logits.grad[~unknown] != 0).all()
    metrics = MetricSet(source.spec.tasks, source.label_rates(), torch.device("cpu"), exact_auc=True)
    metrics.update(logits.detach(), batch.labels, batch.weights, batch.group)
    assert metrics.compute()["buy/examples"] == (~unknown).sum()


@pytest.mark.parametrize("logarithmic", [False, True])
def test_fill_and_indicator(tmp_path, logarithmic):
    table = table_with_gaps()
    settings = NUMERIC | {"log_numeric": ["price"] if logarithmic else []}
    source = build_source(
        make_config(tmp_path, table, **settings, missing_fill={"price": -1}, missing_indicator=["p*"])
    )
    assert source.spec.candidate_dense == ("price", "age", "price.missing")
    batch = whole(source)
    missing = lacks(table["price"])[batch.row.numpy()]
    price = np.where(missing, -1, np.array(table["price"])[batch.row.numpy()])
    price = np.sign(price) * np.log1p(np.abs(price)) if logarithmic else price
    np.testing.assert_allclose(batch.candidate_dense[:, 0], (price - price.mean()) / price.std(), atol=1e-5)
    assert batch.candidate_dense[:, 2].tolist() == missing.tolist()

    by_mean = whole(build_source(make_config(tmp_path, table, **settings)))
    assert (by_mean.candidate_dense[:, 0].numpy()[missing] == 0).all()
    assert by_mean.candidate_dense.shape[1] == 2


def test_a_fill_is_part_of_what_weights_are_for(tmp_path):
    table = table_with_gaps()
    first = build_source(make_config(tmp_path, table, **NUMERIC))
    filled = make_config(tmp_path, table, **NUMERIC, missing_fill={"price": 0.5})
    source = build_source(filled)
    assert first.fingerprint != source.fingerprint
    source.keep_mapping(tmp_path / "run")
    filled.vocabulary_of = str(tmp_path / "run")
    assert build_source(filled).fingerprint == source.fingerprint
    filled.missing_fill = {}
    with pytest.raises(ValueError, match=r"filled in missing numbers by \{'price': 0\.5\}, this configuration by \{\}"):
        build_source(filled)


def test_a_request_in_plain_python_is_filled_as_files_are(tmp_path):
    table = table_with_gaps()
    config = make_config(
        tmp_path, table, **NUMERIC, log_numeric=["price"], missing_fill={"price": 0}, missing_indicator=["price"]
    )
    source = build_source(config)
    source.keep_mapping(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {"data": vars(config)}}))
    read = RequestReader(tmp_path / "run", source.spec)
    batch = whole(source)
    rows = [{name: column[row] for name, column in table.items()} for row in batch.row.tolist()]
    assert any(math.isnan(row["price"]) for row in rows)
    actual = read(rows[0], rows, {}, 0)
    torch.testing.assert_close(actual.candidate_dense, batch.candidate_dense)
    rows[0]["price"] = None
    assert read(rows[0], rows[:1], {}, 0).candidate_dense[0, 2] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missing_nan": ["cost"]}, r"data\.missing_nan names \['cost'\], .* there are \['click', 'price'\]"),
        ({"missing_nan": ["click"], "labels": {"c": "click == 1"}}, r"data\.missing_nan names \['click'\]"),
        ({"missing_indicator": ["cost*"]}, r"data\.missing_indicator names \['cost\*'\]"),
        ({"missing_fill": {"cost": 0}}, r"data\.missing_fill names \['cost'\]"),
        (
            {"missing_fill": {"price": math.nan}},
            r"data\.missing_fill\.price=nan must be a finite number that float32 can hold, e\.g\. 0",
        ),
    ],
)
def test_what_is_no_numeric_column_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        build_source(make_config(tmp_path, make_table(), candidate_numeric=["price"], **changes))


def test_a_column_may_not_be_called_as_an_indicator(tmp_path):
    columns = ["price", "price.missing"]
    with pytest.raises(ValueError, match=r"column 'price\.missing' has the name of an indicator"):
        build_source(make_config(tmp_path, make_table(), candidate_numeric=columns))

"""A run goes on with other files: `data.vocabulary_of` and `data.new_ids`."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.events.test_data_events import make_config, make_table, rows_of, words
from tests.data.sources import whole
from train.data import build_source


def test_a_run_on_other_files_keeps_rows_of_ids_and_scales_of_numbers(tmp_path, caplog):
    build_source(make_config(tmp_path, make_table(seed=2))).keep_mapping(tmp_path / "run")  # and its data was changed
    first = build_source(make_config(tmp_path, make_table(), candidate_numeric=["price"], min_count=2))
    first.keep_mapping(tmp_path / "run")
    table = make_table(seed=1)
    table |= {"item": table["item"] + 15, "price": table["price"] * 2}
    with caplog.at_level(logging.INFO, "train"):
        second = build_source(
            make_config(tmp_path, table, candidate_numeric=["price"], vocabulary_of=str(tmp_path / "run"))
        )
    earlier, now = words(first, "item"), words(second, "item")
    assert now[: len(earlier)] == earlier
    new = now[len(earlier) :]
    assert new == sorted(new)
    trained = set(table["item"][np.argsort(table["time"], kind="stable")][:160].astype(str))
    assert set(new) == trained - set(earlier)
    told = f"table 'item': {len(earlier) - 1} ids keep their rows, {len(new)} new ones got rows, 0 others"
    assert any(message.startswith(told) for message in caplog.messages)
    assert second.meta["numeric"] == first.meta["numeric"]
    assert second.extends == first.fingerprint != second.fingerprint
    counts = pq.read_table(second.folder / "vocabulary" / "item.parquet")["count"].to_pylist()
    assert sum(counts) == 160
    assert 0 in counts  # an id of the first run that the second never sees


def test_without_new_ids_other_files_are_read_as_the_run_would(tmp_path):
    first = build_source(make_config(tmp_path, make_table(), candidate_numeric=["price"]))
    first.keep_mapping(tmp_path / "run")
    table = make_table(seed=1)
    table |= {"item": table["item"] + 15, "click": np.ones_like(table["click"])}
    settings = {"candidate_numeric": ["price"], "vocabulary_of": str(tmp_path / "run"), "new_ids": False}
    second = build_source(make_config(tmp_path, table, **settings, split=[1, 0, 0]))
    assert second.fingerprint == first.fingerprint
    assert second.label_rates() == first.label_rates()
    known = np.isin(table["item"].astype(str), words(first, "item")[1:])
    rows = np.concatenate(rows_of(whole(second).candidate_sparse, "item"))
    assert 0 < (rows == 0).sum() == (~known).sum()
    with pytest.raises(ValueError, match="data.new_ids=false knows no id at all without data.vocabulary_of"):
        build_source(make_config(tmp_path, table, new_ids=False))


def test_hashed_ids_need_the_scales_alone(tmp_path):
    hashed = {"id_map": "hash", "hash_rows": 50, "candidate_numeric": ["price"]}
    first = build_source(make_config(tmp_path, make_table(), **hashed))
    first.keep_mapping(tmp_path / "run")
    hashed["vocabulary_of"] = str(tmp_path / "run")
    assert build_source(make_config(tmp_path, make_table(seed=1), **hashed)).fingerprint == first.fingerprint
    with pytest.raises(ValueError, match=r"use data.id_map=hash data.hash_rows=50"):
        build_source(make_config(tmp_path, make_table(), **(hashed | {"id_map": "vocabulary"})))
    with pytest.raises(ValueError, match=r"thing would have no weights to go on with"):
        build_source(make_config(tmp_path, make_table(), **hashed, tables={"item": "thing"}))
    with pytest.raises(ValueError, match=r"holds no mapping.json; name a run directory"):
        build_source(make_config(tmp_path, make_table(), **(hashed | {"vocabulary_of": str(tmp_path)})))

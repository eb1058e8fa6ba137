"""Ids that are rare in training, or unseen: which are rare in a table, and the rows that the others share."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.events.test_data_events import make_config, make_table, words
from tests.data.features.test_data_columns import column
from tests.data.sources import whole
from train.data import build_source
from train.data.features.columns import read_ids
from train.data.features.vocabulary import Vocabulary, hash_texts, occurrences
from train.data.summary import summarise

OOV = {"min_count": 6, "oov_rows": 3}


def test_rare_ids_have_no_rows(tmp_path, caplog):
    table = make_table()
    order = np.argsort(table["time"], kind="stable")[:160]
    ids, counts = np.unique(table["item"][order].astype(str), return_counts=True)
    with caplog.at_level(logging.INFO, "train"):
        source = build_source(make_config(tmp_path, table, min_count=6))
    frequent = ids[counts >= 6].tolist()
    assert 0 < len(frequent) < len(ids)
    assert words(source, "item") == [None, *frequent]
    share = 100 * counts[counts >= 6].sum() / 160
    assert caplog.messages[1:] == [
        f"table 'item': {len(frequent)} ids have rows, {len(ids) - len(frequent)} that occur in training have none; "
        f"known are {share:.2f} % of all occurrences"
    ]


def test_rare_and_unseen_ids_are_hashed_into_rows_apart_from_missing_ones(tmp_path):
    ids = read_ids(column(["b", "a", "c", "a", None, "z"]))
    training = np.array([True, True, True, True, True, False])
    vocabulary = Vocabulary([("item", ids.values, occurrences(ids, training))], {"item": 2}, oov_rows=4)
    assert vocabulary.size("item") == 6
    rows = dict(zip(["b", "a", "c", "a", None, "z"], vocabulary.ids("item", ids).tolist(), strict=True))
    assert (rows[None], rows["a"]) == (0, 5)
    for text in ("b", "c", "z"):
        (text_hash,) = hash_texts(read_ids(column([text])).values)
        assert rows[text] == 1 + int(text_hash) % 4
    assert len({rows[text] for text in ("b", "c", "z")}) > 1
    vocabulary.save(tmp_path / "vocabulary")
    saved = pq.read_table(tmp_path / "vocabulary" / "item.parquet").to_pydict()
    assert saved == {"row": [5], "value": ["a"], "count": [2]}
    digests = {
        Vocabulary([("item", ids.values, occurrences(ids, training))], {"item": 2}, oov_rows=rows).digest()
        for rows in (0, 1, 4)
    }
    assert len(digests) == 3


def test_a_source_with_rows_of_unknown_ids(tmp_path):
    table = make_table(item=[None, *make_table()["item"][1:]])
    plain = build_source(make_config(tmp_path, table, min_count=6))
    source = build_source(make_config(tmp_path, table, **OOV))
    assert source.spec.tables == {name: rows + 3 for name, rows in plain.spec.tables.items()}
    assert source.fingerprint != plain.fingerprint
    batch = whole(source)
    theirs, mine = (whole(each).candidate_sparse["item"].values().numpy() for each in (plain, source))
    missing = batch.row.numpy() == 0
    assert missing.any()
    assert (mine[missing] == 0).all()
    known = theirs > 0
    assert (mine[known] == theirs[known] + 3).all()
    assert set(mine[~known & ~missing]) == {1, 2, 3}
    share = [line.split()[-2] for line in summarise(source)[1].splitlines() if line.startswith("item ")]
    assert (
        share == [line.split()[-2] for line in summarise(plain)[1].splitlines() if line.startswith("item ")] != ["100%"]
    )


def test_a_run_on_other_files_keeps_them(tmp_path):
    first = build_source(make_config(tmp_path, make_table(), **OOV))
    first.keep_mapping(tmp_path / "run")
    later = make_config(tmp_path, make_table(seed=1), **OOV, vocabulary_of=str(tmp_path / "run"))
    second = build_source(later)
    earlier = words(first, "item")
    assert words(second, "item")[: len(earlier)] == earlier
    later.new_ids = False
    frozen = build_source(later)
    assert frozen.fingerprint == first.fingerprint
    assert whole(frozen).candidate_sparse["item"].values().unique().tolist()[0] == 1
    later.oov_rows = 0
    with pytest.raises(ValueError, match=r"other rows for unknown ids than data\.oov_rows=0; use data\.oov_rows=3"):
        build_source(later)

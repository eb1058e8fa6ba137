"""The `events` source: batches hold what the schema says, held against a plain reading of the table."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.tokens import FeatureEmbedding
from tests.data.sources import events_config, whole
from train.config.schema import EventsConfig, HistoryConfig, JoinConfig
from train.data import build_source


def make_table(count=200, users=7, seed=0, **changes) -> dict:
    generator = np.random.default_rng(seed)
    table = {
        "user": generator.integers(users, size=count) + 100,
        "time": generator.integers(3000, size=count),
        "item": generator.integers(30, size=count),
        "price": generator.exponential(size=count),
        "click": generator.integers(2, size=count),
    }
    return table | changes


def make_config(tmp_path, table: dict, **changes) -> EventsConfig:
    pq.write_table(pa.table(table), tmp_path / "events.parquet")
    return events_config(tmp_path, **{"files": ["events.parquet"]} | changes)


def rows_of(features, key) -> list[list[int]]:
    return [part.tolist() for part in features[key].values().split(features[key].lengths().tolist())]


def words(source, table) -> list[str | None]:
    """Text of each row of an embedding table, from the saved vocabulary."""
    file = source.folder / "vocabulary" / f"{quote(table, safe='')}.parquet"
    return [None, *pq.read_table(file)["value"].to_pylist()]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_candidates_are_the_rows_of_the_file(tmp_path, split):
    table = make_table()
    config = make_config(
        tmp_path, table, candidate_numeric=["price"], histories={"seen": HistoryConfig(["item", "click"])}
    )
    source = build_source(config)
    batch, items, users = whole(source, split), words(source, "item"), words(source, "user")
    assert batch.row.unique().numel() == batch.num_candidates
    owner = batch.owner.numpy()
    for c, row in enumerate(batch.row.tolist()):
        known = str(table["item"][row]) if str(table["item"][row]) in items else None
        assert items[batch.candidate_sparse["item"].values()[c]] == known
        assert batch.labels[c, 0] == table["click"][row]
        assert users[batch.request_sparse["user"].values()[owner[c]]] == str(table["user"][row])
        request_time = batch.request_time[owner[c]].item()
        assert request_time <= table["time"][row] <= request_time + config.request_window
    training = whole(source).row.numpy()
    price = table["price"]
    expected = (price[batch.row] - price[training].mean()) / price[training].std()
    np.testing.assert_allclose(batch.candidate_dense[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_history_is_the_users_earlier_rows_that_meet_the_condition(tmp_path):
    table = make_table()
    histories = {"click": HistoryConfig(["item", "user"], where={"click": 1}), "any": HistoryConfig(["item"])}
    source = build_source(make_config(tmp_path, table, histories=histories, max_history=5))
    items, longest = words(source, "item"), 0
    for split in ("train", "valid", "test"):
        batch = whole(source, split)
        first = batch.row[batch.candidate_offsets[:-1]].tolist()
        for name, condition in (("click", table["click"] == 1), ("any", table["click"] >= 0)):
            found, times = rows_of(batch.histories, f"{name}.item"), rows_of(batch.history_times, name)
            for r, row in enumerate(first):
                earlier = np.flatnonzero(
                    condition & (table["user"] == table["user"][row]) & (table["time"] < batch.request_time[r].item())
                )
                earlier = earlier[np.argsort(table["time"][earlier], kind="stable")][-5:]
                longest = max(longest, len(earlier))
                known = [str(i) if str(i) in items else None for i in table["item"][earlier]]
                assert [items[i] for i in found[r]] == known
                assert times[r] == table["time"][earlier].tolist()
    assert longest == 5


def test_vocabulary_has_the_ids_of_training_rows_and_counts_each_row_once(tmp_path):
    table = make_table(item=np.arange(200) % 150)
    source = build_source(make_config(tmp_path, table, histories={"any": HistoryConfig(["item"])}))
    training = whole(source).row.numpy()
    saved = pq.read_table(source.folder / "vocabulary" / "item.parquet").to_pydict()
    values, counts = np.unique(table["item"][training].astype(str), return_counts=True)
    assert saved["value"] == values.tolist()
    assert saved["count"] == counts.tolist()
    batch = whole(source, "test")
    unseen = ~np.isin(table["item"][batch.row], table["item"][training])
    assert unseen.any()
    assert ((batch.candidate_sparse["item"].values() == 0).numpy() == unseen).all()


def test_min_count_and_hashing(tmp_path):
    table = make_table(item=np.arange(200) // 2 * (np.arange(200) % 2))
    frequent = build_source(make_config(tmp_path, table, min_count=2))
    assert frequent.spec.tables["item"] == 2
    hashed = build_source(make_config(tmp_path, table, id_map="hash", hash_rows=50))
    assert hashed.spec.tables == {"user": 50, "item": 50}
    assert whole(hashed, "test").candidate_sparse.values().min() > 0


def test_every_format_gives_the_same_batches(tmp_path):
    table = make_table(count=60)
    (tmp_path / "parts").mkdir()
    rows = pa.table(table)
    csv.write_csv(rows[:20], tmp_path / "parts" / "a.csv")
    with pa.CompressedOutputStream(tmp_path / "parts" / "b.csv.gz", "gzip") as file:
        csv.write_csv(rows[20:], file)
    reference = whole(build_source(make_config(tmp_path, table)))
    for files in (["parts"], ["parts/*"], ["parts/a.csv", "parts/b.csv.gz"]):
        source = build_source(make_config(tmp_path, table, files=files))
        batch = whole(source)
        assert torch_equal(batch, reference)
    assert source.locate(25).endswith("b.csv.gz, row 6")


def torch_equal(left, right) -> bool:
    same = left.lookup.values().equal(right.lookup.values()) and left.lookup.lengths().equal(right.lookup.lengths())
    return same and left.labels.equal(right.labels) and left.row.equal(right.row)


def test_unsorted_rows_are_sorted(tmp_path):
    table = make_table(time=np.random.default_rng(0).permutation(200) * 100)
    shuffled = np.random.default_rng(1).permutation(200)
    histories = {"any": HistoryConfig(["item"])}
    ordered = whole(build_source(make_config(tmp_path, table, histories=histories)))
    mixed = {name: values[shuffled] for name, values in table.items()}
    batch = whole(build_source(make_config(tmp_path, mixed, histories=histories)))
    assert shuffled[batch.row].tolist() == ordered.row.tolist()
    assert batch.lookup.values().equal(ordered.lookup.values())


def test_request_column_and_list_and_request_features(tmp_path):
    table = {
        "session": ["s1", "s2", "s1", "s3"],
        "user": [1, 2, 1, 1],
        "time": [10, 20, 500, 900],
        "item": [5, 6, 7, 8],
        "age": [30.0, None, 30.0, 40.0],
        "tags": [["x", "y"], [], None, ["y"]],
        "click": [1, 0, None, 1],
    }
    config = make_config(
        tmp_path, table, request="session", candidate_list=["tags"], request_numeric=["age"], split=[1.0, 0.0, 0.0]
    )
    source = build_source(config)
    batch, tags = whole(source), words(source, "tags")
    assert batch.row.tolist() == [0, 2, 1, 3]
    assert batch.candidate_offsets.tolist() == [0, 2, 3, 4]
    assert batch.labels[:, 0].isnan().tolist() == [False, True, False, False]
    assert [[tags[i] for i in row] for row in rows_of(batch.candidate_sparse, "tags")] == [["x", "y"], [], [], ["y"]]
    assert batch.group[0] == batch.group[3] != batch.group[2]
    assert batch.request_dense[1, 0] == 0  # a missing number is the training mean
    assert source.label_rates() == {"click": pytest.approx(2 / 3)}
    assert (source.num_requests("valid"), source.num_requests("test")) == (0, 0)


def test_lists_as_history_share_tables_and_are_cut_to_the_newest(tmp_path):
    table = {
        "user": [1, 2, 3],
        "time": [100, 200, 300],
        "item": [5, 6, 7],
        "viewed": ["9|5|6", "", "7"],
        "when": ["30|10|20", "", "299"],
        "click": [1, 0, 1],
    }
    history = HistoryConfig(["viewed"], lists=True, times="when")
    config = make_config(
        tmp_path, table, histories={"view": history}, tables={"viewed": "item"}, max_history=2, split=[1.0, 0.0, 0.0]
    )
    source = build_source(config)
    batch, items = whole(source), words(source, "item")
    assert [[items[i] for i in row] for row in rows_of(batch.histories, "view.viewed")] == [["6", "9"], [], ["7"]]
    assert rows_of(batch.history_times, "view") == [[20, 30], [], [299]]
    assert source.spec.tables == {"user": 4, "item": 5}
    config.histories["view"].times = None
    batch = whole(build_source(config))
    assert [[items[i] for i in row] for row in rows_of(batch.histories, "view.viewed")] == [["5", "6"], [], ["7"]]
    assert rows_of(batch.history_times, "view") == [[99, 99], [], [299]]


def test_log_history_and_joins(tmp_path):
    table = {"user": [1, 2], "time": [100, 100], "item": [5, 6], "click": [1, 0]}
    pq.write_table(
        pa.table({"who": [1, 1, 2, 9, 1], "at": [100, 50, 99, 1, 40], "kind": list("aabaa"), "brand": list("xyzwv")}),
        tmp_path / "log.parquet",
    )
    (tmp_path / "items.csv").write_text("item_id,brand,weight\n6,q,2.5\n5,y,\n4,r,1\n")
    config = make_config(
        tmp_path,
        table,
        split=[1.0, 0.0, 0.0],
        joins=[JoinConfig(["items.csv"], column="item", key="item_id")],
        candidate_categorical=["item", "brand"],
        candidate_numeric=["weight"],
        histories={"a": HistoryConfig(["brand"], where={"kind": "a"}, files=["log.parquet"], user="who", time="at")},
    )
    source = build_source(config)
    batch, brands = whole(source), words(source, "brand")
    assert [brands[i] for i in batch.candidate_sparse["brand"].values()] == ["y", "q"]
    assert [[brands[i] for i in row] for row in rows_of(batch.histories, "a.brand")] == [["v", "y"], []]
    # Of the log, only what training requests see is in the vocabulary.
    assert brands == [None, "q", "v", "y"]
    assert batch.candidate_dense[:, 0].tolist() == [0, 0]


def test_a_log_takes_columns_that_it_lacks_from_joins_too(tmp_path):
    table = {"user": [1], "time": [100], "item": [5], "click": [1]}
    pq.write_table(pa.table({"user": [1, 1, 1], "time": [1, 2, 3], "item": [6, 7, 6]}), tmp_path / "log.parquet")
    pq.write_table(pa.table({"item": [5, 6], "brand": ["x", "y"]}), tmp_path / "items.parquet")
    config = make_config(
        tmp_path,
        table,
        split=[1.0, 0.0, 0.0],
        joins=[JoinConfig(["items.parquet"], column="item")],
        candidate_categorical=["brand"],
        histories={"seen": HistoryConfig(["item", "brand"], files=["log.parquet"])},
    )
    source = build_source(config)
    brands = words(source, "brand")
    assert [[brands[i] for i in row] for row in rows_of(whole(source).histories, "seen.brand")] == [["y", None, "y"]]


def test_a_log_may_write_its_times_otherwise(tmp_path):
    table = {"user": [1], "time": ["1970-01-01 00:01"], "item": [5], "click": [1]}
    log = {"user": [1, 1], "time": [59_000, 61_000], "brand": ["before", "after"]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    history = HistoryConfig(["brand"], files=["log.parquet"], time_format="ms")
    settings = {"time_format": "%Y-%m-%d %H:%M", "split": [1.0, 0.0, 0.0], "histories": {"seen": history}}
    source = build_source(make_config(tmp_path, table, **settings))
    assert words(source, "brand") == [None, "before"]


def test_logs_have_headers_of_their_own_beside_files_without(tmp_path):
    (tmp_path / "bare.csv").write_text("1,100,5,1\n2,100,6,0\n")
    (tmp_path / "log.csv").write_text("time,item,user\n40,6,1\n50,5,1\n")
    config = make_config(
        tmp_path,
        make_table(count=1),
        files=["bare.csv"],
        column_names=["user", "time", "item", "click"],
        split=[1.0, 0.0, 0.0],
        histories={"seen": HistoryConfig(["item"], files=["log.csv"])},
    )
    source = build_source(config)
    batch, items = whole(source), words(source, "item")
    assert [[items[i] for i in row] for row in rows_of(batch.histories, "seen.item")] == [["6", "5"], []]
    assert rows_of(batch.history_times, "seen") == [[40, 50], []]


def test_an_event_that_only_a_test_request_sees_is_not_in_the_vocabulary(tmp_path):
    table = {"user": [1, 1], "time": [100, 200], "item": [5, 5], "click": [1, 0]}
    log = {"user": [1, 1], "time": [50, 150], "brand": ["early", "late"]}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    histories = {"seen": HistoryConfig(["brand"], files=["log.parquet"])}
    source = build_source(make_config(tmp_path, table, histories=histories, split=[0.5, 0.0, 0.5]))
    assert words(source, "brand") == [None, "early"]
    assert rows_of(whole(source, "test").histories, "seen.brand") == [[1, 0]]


def test_names_that_are_no_file_names(tmp_path):
    names = ["a/b", "100%", "c.d"]
    table = make_table(count=20) | {name: [[i % 3] for i in range(20)] for name in names}
    histories = {"x/y": HistoryConfig(["item"])}
    source = build_source(make_config(tmp_path, table, candidate_list=names, histories=histories))
    batch = whole(source)
    assert batch.histories.keys() == ["x/y.item"]
    for name in names:
        read = [words(source, name.replace(".", "_"))[i] for i in batch.candidate_sparse[name].values()]
        assert read == [str(row % 3) for row in batch.row.tolist()]
    assert source.spec.tables.keys() == {"user", "item", "a/b", "100%", "c_d"}  # a dot parts names of parameters


def test_fingerprint_tells_which_rows_ids_get_and_how_numbers_are_scaled(tmp_path):
    table = make_table(item=np.arange(200) % 150 + 100)

    def fingerprint(table=table, **changes):
        return build_source(make_config(tmp_path, table, candidate_numeric=["price"], **changes)).fingerprint

    first = fingerprint()
    assert fingerprint(cache_dir=str(tmp_path / "elsewhere")) == first
    # Neither the order of rows nor what a batch takes of them decides what an id means.
    reversed_table = {name: column[::-1] for name, column in table.items()}
    assert fingerprint(reversed_table, request_window=0, max_candidates=1) == fingerprint(
        request_window=0, max_candidates=1
    )
    others = [
        fingerprint(split=[0.5, 0.25, 0.25]),
        fingerprint(min_count=2),
        fingerprint(table | {"item": table["item"] + 1}),
        fingerprint(table | {"price": table["price"] * 2}),
        fingerprint(tables={"item": "thing"}),
        fingerprint(id_map="hash"),
        fingerprint(id_map="hash", hash_rows=50),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_rows_that_came_later_are_read_by_the_ids_of_the_training_rows(tmp_path):
    table, later = make_table(), make_table(count=30, seed=1, item=np.arange(30) + 1000)
    pq.write_table(pa.table(later), tmp_path / "later.parquet")
    first = build_source(make_config(tmp_path, table))
    source = build_source(make_config(tmp_path, table, test_files=["later.parquet"], split=[0.8, 0.2, 0]))
    assert source.fingerprint == first.fingerprint
    assert whole(source).row.equal(whole(first).row)
    assert sorted(whole(source, "test").row.tolist()) == list(range(len(table["item"]), len(table["item"]) + 30))


def test_weights_of_rows(tmp_path):
    table = make_table(weight=[None, *(np.arange(1, 200) % 4 / 2)])
    source = build_source(make_config(tmp_path, table, weight="weight", labels={"a": "click", "b": "click"}))
    batch = whole(source)
    weights = np.array([1, *table["weight"][1:]])[batch.row.numpy()]
    assert batch.weights.tolist() == [[weight, weight] for weight in weights]
    rate = np.average(table["click"][batch.row.numpy()], weights=weights)
    assert source.label_rates() == pytest.approx({"a": rate, "b": rate})
    with pytest.raises(ValueError, match=r"row 1: column 'weight' is -1.*, expected a weight of at least 0"):
        build_source(make_config(tmp_path, make_table(weight=-np.ones(200)), weight="weight"))


def test_no_user_and_no_time(tmp_path):
    table = make_table(count=20)
    config = make_config(tmp_path, table, user=None, time=None, request_categorical=[])
    source = build_source(config)
    batch = whole(source)
    assert batch.row.tolist() == list(range(16))
    assert batch.candidate_offsets.tolist() == list(range(17))
    assert batch.group.unique().numel() == 16
    assert source.spec.max_candidates == 1
    assert batch.lookup.stride() == 16


@pytest.mark.parametrize("rows_at_once", [1000, 30])
@pytest.mark.parametrize(
    ("changes", "longest", "most"),
    [
        ({"request": "request"}, 20, 32),
        ({"request": "request", "max_candidates": 12}, 12, 12),
        ({"request_window": 10**6}, 8, 8),
    ],
)
def test_a_request_id_means_a_request(tmp_path, caplog, rows_at_once, changes, longest, most):
    table = make_table(count=100, users=1, request=np.repeat(np.arange(5), 20), time=np.arange(100))
    source = build_source(make_config(tmp_path, table, split=[1, 0, 0], rows_at_once=rows_at_once, **changes))
    assert whole(source).candidate_offsets.diff().max() == longest
    assert source.spec.max_candidates == most
    assert ("5 of 5 requests have more than" in caplog.text) == (longest == 12)


def test_an_id_of_a_column_as_label(tmp_path, caplog):
    events = ["view", "buy", None, "add to cart"] * 50
    labels = {"buy": "event == buy", "cart": "event==add to cart", "third": "item == 3", "typo": "event == bye"}
    table = make_table(event=events)
    source = build_source(make_config(tmp_path, table, labels=labels, candidate_categorical=["user"],
                                      request_categorical=[], split=[1, 0, 0]))  # fmt: skip
    batch = whole(source)
    held = np.array(events, object)[batch.row]
    for task, value in enumerate(("buy", "add to cart")):
        expected = np.where(held == None, np.nan, held == value).astype(float)  # noqa: E711
        np.testing.assert_array_equal(batch.labels[:, task].numpy(), expected)
    assert batch.labels[:, 2].tolist() == (table["item"][batch.row] == 3).astype(float).tolist()
    assert "no row meets event == bye; the column holds e.g. ['view', 'buy', 'add to cart']" in caplog.text


def test_rating_threshold_as_label_and_logarithm(tmp_path):
    table = make_table(count=50, click=np.arange(50) % 5 + 1, price=np.arange(50.0) - 20)
    config = make_config(
        tmp_path,
        table,
        labels={"good": "click >= 4"},
        candidate_numeric=["price"],
        log_numeric=["price"],
        split=[1, 0, 0],
    )
    batch = whole(build_source(config))
    rows = batch.row.numpy()
    assert batch.labels[:, 0].tolist() == (table["click"][rows] >= 4).tolist()
    scaled = np.sign(table["price"]) * np.log1p(np.abs(table["price"]))
    np.testing.assert_allclose(batch.candidate_dense[:, 0], ((scaled - scaled.mean()) / scaled.std())[rows], rtol=1e-5)


def test_a_number_that_is_the_same_in_every_training_row_is_not_blown_up_elsewhere(tmp_path):
    late = np.arange(200) >= 190
    table = make_table(time=np.arange(200) * 1000, price=np.where(late, 0.3, 0.1))
    source = build_source(make_config(tmp_path, table, candidate_numeric=["price"]))
    assert np.full(160, 0.1).std() > 0  # a rounding
    assert whole(source, "test").candidate_dense.flatten().tolist() == pytest.approx([0.0] * 10 + [0.2] * 10)


def test_files_of_their_own_decide_the_split(tmp_path):
    pq.write_table(pa.table(make_table(count=30, seed=1)), tmp_path / "test.parquet")
    source = build_source(make_config(tmp_path, make_table(count=90), test_files=["test.parquet"], max_candidates=1))
    assert [source.num_requests(split) for split in ("train", "valid", "test")] == [80, 10, 30]
    assert sorted(whole(source, "test").row.tolist()) == list(range(90, 120))


def test_cache_is_used_again_and_renewed_when_a_file_or_the_schema_changes(tmp_path):
    config = make_config(tmp_path, make_table())
    first = build_source(config)
    stamp = (first.folder / "meta.json").stat().st_mtime_ns
    config.batch_size, config.max_history = 7, 3
    again = build_source(config)
    assert (again.folder, (again.folder / "meta.json").stat().st_mtime_ns) == (first.folder, stamp)
    config.max_candidates = 2
    assert build_source(config).folder != first.folder
    config = make_config(tmp_path, make_table(count=150))
    assert build_source(config).folder != first.folder
    assert not list((tmp_path / "cache").glob("*.*"))  # no temporary folder is left


def test_a_column_of_any_name_is_a_feature(tmp_path):
    """Also one that is called as an attribute of the module that holds the tables, such as `type` and `items`."""
    names = [*dir(torch.nn.ModuleDict()), "i.d", "a b", "x[0]", "9", "", " "]
    table = make_table()
    pq.write_table(pa.table(table | dict.fromkeys(names, table["item"])), tmp_path / "rows.parquet")
    config = make_config(tmp_path, table)
    config.files, config.candidate_categorical = ["rows.parquet"], ["item", *names]
    config.histories, config.tables = {"seen": HistoryConfig(["items"])}, {"type": "keys", "update": "update"}
    source = build_source(config)
    tables = {feature.name: feature.table for feature in source.spec.candidate}
    assert tables["items"] == "items_"
    assert tables["type"] == tables["keys"] == "keys_"
    assert tables["i.d"] == "i_d"
    widths = {tables["train"]: 4, tables["pop"]: 4}
    ours, local = FeatureEmbedding(source.spec, 8, "cpu", widths), LocalEmbedding(source.spec, 8, "cpu", widths)
    local.load_state_dict(ours.state_dict())
    batch = whole(source)
    assert ours(batch).candidate.equal(local(batch).candidate)
    config.candidate_categorical, config.tables = ["items", "items_"], {}
    config.cache_dir = str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"columns 'items' and 'items_' would share the table 'items_'"):
        build_source(config)

"""The shipped `configs/data` examples read files of their layouts (official columns, random values)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from train.config.schema import EventsConfig, register_schema
from train.data import build_source
from train.data.source import Source

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ROWS = 60

PROFILE = "cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,shopping_level,occupation"
AD = "adgroup_id,cate_id,campaign_id,customer,brand,price"
AVAZU = (
    "C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,device_model,"
    "device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
GENERATOR = np.random.default_rng(0)
LISTS = [GENERATOR.integers(6, size=GENERATOR.integers(5)).tolist() for _ in range(ROWS)]


def digits(high: int = 6) -> list[int]:
    return GENERATOR.integers(high, size=ROWS).tolist()


def write(path: Path, header: str | None, rows: Iterable[Iterable[object]], separator: str = ",") -> None:
    lines = [separator.join(map(str, row)) for row in rows]
    path.write_text("\n".join(([header] if header else []) + lines) + "\n")


def columns(header: str, **given: Iterable[object]) -> Iterable[tuple[object, ...]]:
    """Rows of the header's columns: those given, small random integers for the others."""
    return zip(*(given.get(name, digits()) for name in header.split(",")), strict=True)


def write_taobao_ad(folder: Path) -> None:
    header = f"userid,{PROFILE},new_user_class_level,{AD},pid"
    table = {name: digits() for name in header.split(",")} | dict.fromkeys(["btag_his", "cate_his", "brand_his"], LISTS)
    pq.write_table(pa.table({**table, "clk": digits(2)}), folder / "train.parquet")


def write_taobao_ad_raw(folder: Path) -> None:
    header = "user,time_stamp,adgroup_id,pid,nonclk,clk"
    write(folder / "raw_sample.csv", header, columns(header, time_stamp=range(1000, 1000 + ROWS), clk=digits(2)))
    write(folder / "ad_feature.csv", AD, [(i, i, i, i, "NULL" if i else 7, 1.5) for i in range(5)])
    header = f"userid,{PROFILE},new_user_class_level "
    write(folder / "user_profile.csv", header, [(i, 1, 2, 1, "", 3, 0, "", 1) for i in range(5)])
    header = "user,time_stamp,btag,cate,brand"
    rows = columns(header, time_stamp=range(990, 990 + ROWS), btag=["pv", "cart", "buy"] * (ROWS // 3))
    write(folder / "behavior_log.csv", header, rows)


def write_taobao_ad_flat(folder: Path) -> None:
    header = f"clk,time_stamp,userid,pid,{PROFILE},{AD},click_sequence"
    times = [datetime.datetime(2017, 5, 6) + datetime.timedelta(hours=i) for i in range(ROWS)]
    sequences = ["^".join(map(str, items)) for items in LISTS]
    for name in ("train_sample.csv", "valid_sample.csv"):
        write(folder / name, header, columns(header, clk=digits(2), time_stamp=times, click_sequence=sequences))


def write_kuairand(folder: Path) -> None:
    header = "user_id,video_id,tab,time_ms,is_click,is_like,long_view"
    for name in ("log_standard_4_08_to_4_21_1k.csv", "log_standard_4_22_to_5_08_1k.csv"):
        times = 1649347429825 + GENERATOR.integers(10**9, size=ROWS)
        labels = {task: digits(2) for task in ("is_click", "is_like", "long_view")}
        write(folder / name, header, columns(header, time_ms=times, **labels))
    header = (
        "user_id,user_active_degree,is_video_author,onehot_feat0,onehot_feat1,onehot_feat2,"
        "follow_user_num,fans_user_num,friend_user_num,register_days"
    )
    write(folder / "user_features_1k.csv", header, [(i, "full_active", 1, 0, 1, "2.0", 5, 6, 7, 800) for i in range(6)])
    header = "video_id,author_id,video_type,upload_type,music_id,video_duration,tag"
    rows = [(i, i, "NORMAL", "Kmovie", 9.0, "", '"12,65"') for i in range(6)]
    write(folder / "video_features_basic_1k.csv", header, rows)


def write_criteo_kaggle(folder: Path) -> None:
    numbers = zip(digits(2), *(digits() for _ in range(13)), strict=True)
    write(folder / "train.txt", None, [[*row, *["05db9164", ""] * 13] for row in numbers], "\t")


def write_avazu(folder: Path) -> None:
    header = f"id,click,hour,{AVAZU}"
    hours = [14102100 + i % 24 for i in range(ROWS)]
    write(folder / "train.csv", header, columns(header, id=[2**63 + 5] * ROWS, click=digits(2), hour=hours))


def write_amazon_electronics(folder: Path) -> None:
    header = "label,user_id,item_id,cate_id,item_history,cate_history"
    sequences = ["^".join(map(str, items)) for items in LISTS]
    for name in ("train.csv", "test.csv"):
        rows = columns(header, label=digits(2), item_history=sequences, cate_history=sequences)
        write(folder / name, header, rows)


def write_splits(folder: Path, header: str, suffix: str = ".csv", **given: Iterable[object]) -> None:
    """Files of the three splits with the same rows."""
    for name in ("train", "valid", "test"):
        if suffix == ".csv":
            write(folder / f"{name}.csv", header, columns(header, **given))
        else:
            rows = {column: list(given.get(column, digits())) for column in header.split(",")}
            pq.write_table(pa.table(rows), folder / f"{name}.parquet")


def write_ml1m(folder: Path) -> None:
    """The tables that `tools.datasets ml1m` makes."""
    header = "user,item,position,rating,user_ratings,user_mean,movie_ratings,movie_mean"
    users = [i // 10 for i in range(ROWS)]
    write_splits(folder, header, ".parquet", user=users, position=[i % 10 for i in range(ROWS)])
    pq.write_table(
        pa.table({"item": range(6), "year": [1990] * 6, "genres": [["Drama"]] * 6}), folder / "movies.parquet"
    )
    attributes = {name: ["1"] * 6 for name in ("gender", "age", "occupation")}
    pq.write_table(pa.table({"user": range(6), **attributes}), folder / "users.parquet")


def write_amazon_sequences(folder: Path) -> None:
    write_splits(folder, "user,item,position,label", ".parquet", label=digits(2), position=range(ROWS))


def write_kuaivideo(folder: Path) -> None:
    header = "timestamp,user_id,item_id,is_click,is_like,is_follow,pos_items,neg_items"
    sequences = ["^".join(map(str, items)) for items in LISTS]
    given = {"item_id": [0] * ROWS, "user_id": [0] * ROWS, "pos_items": sequences, "neg_items": ["0"] * ROWS}
    for name in ("train.csv", "test.csv"):
        write(folder / name, header, columns(header, is_click=digits(2), **given))


def write_taobao_ad_x1(folder: Path) -> None:
    header = f"clk,btag_his,cate_his,brand_his,userid,{PROFILE},new_user_class_level,{AD},pid,btag"
    sequences = {name: ["^".join(map(str, items)) for items in LISTS] for name in ("cate_his", "brand_his")}
    same = {name: [1] * ROWS for name in header.split(",") if not name.endswith("_his") and name != "clk"}
    for name in ("train.csv", "test.csv"):
        write(folder / name, header, columns(header, clk=digits(2), btag_his=["1^1"] * ROWS, **sequences, **same))


def write_criteo_x1(folder: Path) -> None:
    names = [*(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    write_splits(folder, ",".join(["label", *names]), label=digits(2))


def write_avazu_x1(folder: Path) -> None:
    write_splits(folder, ",".join(["label", *(f"feat_{i}" for i in range(1, 23))]), label=digits(2))


def write_movielens_latest_x1(folder: Path) -> None:
    write_splits(folder, "label,user_id,item_id,tag_id", label=digits(2))


def write_movielens_ids(folder: Path) -> None:
    rows = {"userId": digits(), "movieId": digits(), "rating": [3.0 + i % 3 for i in range(ROWS)]}
    pq.write_table(pa.table({**rows, "timestamp": range(ROWS)}), folder / "ratings.parquet")


SEQUENCES: dict[str, list[int]] = {"user": [i // 10 for i in range(ROWS)], "position": [i % 10 for i in range(ROWS)]}


def write_ml1m_next(folder: Path) -> None:
    pq.write_table(pa.table({**SEQUENCES, "item": digits(), "rating": digits()}), folder / "ratings.parquet")


def write_amazon_next(folder: Path) -> None:
    pq.write_table(pa.table({**SEQUENCES, "item": digits()}), folder / "events.parquet")


def write_sessions(folder: Path) -> None:
    for number, split in enumerate(("train", "valid", "test")):
        sessions = [user + 6 * number for user in SEQUENCES["user"]]
        table = {"session": sessions, "position": SEQUENCES["position"], "item": digits()}
        pq.write_table(pa.table(table), folder / f"{split}.parquet")


EXAMPLES = {
    "ml1m": (write_ml1m, {"rated"}, 3),
    "ml1m_features": (write_ml1m, {"rated"}, 3),
    "amazon_sequences": (write_amazon_sequences, {"bought"}, 3),
    "kuaivideo": (write_kuaivideo, {"clicked", "passed"}, 2),
    "taobao_ad_x1": (write_taobao_ad_x1, {"category", "brand", "kind"}, 2),
    "criteo_x1": (write_criteo_x1, set(), 3),
    "avazu_x1": (write_avazu_x1, set(), 3),
    "movielens_latest_x1": (write_movielens_latest_x1, set(), 3),
    "movielens_ids": (write_movielens_ids, {"rated"}, 1),
    "taobao_ad": (write_taobao_ad, {"behaviour"}, 1),
    "taobao_ad_raw": (write_taobao_ad_raw, {"view", "intent"}, 1),
    "taobao_ad_flat": (write_taobao_ad_flat, {"click"}, 2),
    "kuairand": (write_kuairand, {"click", "skip"}, 2),
    "criteo_kaggle": (write_criteo_kaggle, set(), 1),
    "avazu": (write_avazu, {"impression", "click"}, 1),
    "amazon_electronics": (write_amazon_electronics, {"review"}, 2),
}


# Next items: what writes the layout, and the requests it has for training, validation and test.
NEXT = {
    "ml1m_next": (write_ml1m_next, (6, 6, 6)),
    "amazon_next": (write_amazon_next, (6, 6, 6)),
    "sessions": (write_sessions, (6, 6, 6)),
}


def source_of(name: str, folder: Path) -> Source:
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        overrides = [f"+data={name}", f"data.root={folder}", f"data.cache_dir={folder / 'cache'}"]
        return build_source(OmegaConf.to_object(compose(None, overrides=overrides).data))


def test_every_shipped_example_is_tried_here():
    shipped = {path.stem for path in (CONFIGS / "data").glob("*.yaml")}
    elsewhere = {"gowalla_m1", "news_log", "shop_log", "video_log"}  # losses of retrieval, generated logs
    assert shipped == {*EXAMPLES, *NEXT, *elsewhere, "movielens", "synthetic", "production", "events"}


@pytest.mark.parametrize("name", NEXT)
def test_shipped_next_item_example_reads_its_layout(tmp_path, name):
    write_files, requests = NEXT[name]
    write_files(tmp_path)
    source = source_of(name, tmp_path)
    assert tuple(source.num_requests(split) for split in ("train", "valid", "test")) == requests
    batch = source.batch("test", np.arange(requests[-1]))
    assert batch.num_candidates == requests[-1]
    assert batch.histories.lengths().tolist() == [9] * 6


@pytest.mark.parametrize("name", EXAMPLES)
def test_shipped_example_reads_its_layout(tmp_path, name):
    write_files, events, files = EXAMPLES[name]
    write_files(tmp_path)
    source = source_of(name, tmp_path)
    batches = [source.batch(split, np.arange(source.num_requests(split))) for split in ("train", "valid", "test")]
    assert sum(batch.num_candidates for batch in batches) == files * ROWS
    assert {event.name for event in source.spec.histories} == events
    assert not events or batches[0].histories.lengths().sum() > 0
    # Every table but those whose columns are empty here has known ids, and training rows use them.
    unknown = {name for name, rows in source.spec.tables.items() if rows == 1}
    assert unknown <= {"age_level", "occupation", "pvalue_level", *(f"C{i}" for i in range(2, 27, 2))}
    assert all(batch.candidate_dense.isfinite().all() for batch in batches)
    assert all(batch.request_dense.isfinite().all() for batch in batches)


def test_the_example_in_the_documentation(tmp_path):
    text = (CONFIGS.parent / "docs" / "data.md").read_text()
    written = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1])
    assert written.pop("defaults") == ["events_schema", "_self_"]
    (tmp_path / "log").mkdir()
    moments = (10**12 + GENERATOR.integers(10**9, size=ROWS)).tolist()
    header = "user_id,country,item_id,clicked,stars,importance"
    table = {name: digits() for name in header.split(",")} | {"time_ms": moments, "clicked": digits(2)}
    table |= {"tags": LISTS, "viewed_items": LISTS, "viewed_at": [[10**12 - 10**6] * len(items) for items in LISTS]}
    pq.write_table(pa.table(table), tmp_path / "log" / "a.parquet")
    write(tmp_path / "items.csv", "item_id,brand,price", [(i, f"b{i % 2}", i + 0.5) for i in range(6)])
    searches = {"user_id": digits(), "searched_at": moments, "query_id": digits()}
    pq.write_table(pa.table(searches), tmp_path / "searches.parquet")
    config = OmegaConf.merge(EventsConfig, written, {"root": str(tmp_path), "cache_dir": str(tmp_path / "cache")})
    source = build_source(OmegaConf.to_object(config))
    assert [event.name for event in source.spec.histories] == ["click", "search", "view"]
    batch = source.batch("train", np.arange(source.num_requests("train")))
    assert batch.history_times.lengths().view(3, -1).sum(1).min() > 0

"""Public data sets from the files that hold them: joins, splits, statistics, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tools.datasets import amazon, files, gowalla, ml1m, sessions
from tools.datasets.__main__ import main


def put(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file = file.with_suffix(".txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two users: 7 rated movies 10, 20, 30 and 40 in this order, 8 rated 30 and 10."""
    rated = [(7, 10, 5), (7, 20, 1), (7, 30, 3), (7, 40, 2), (8, 10, 4), (8, 30, 2), (8, 99, 5)]
    monkeypatch.setattr(ml1m, "_rated", lambda file: rated)
    (tmp_path / "clone/data").mkdir(parents=True)
    (tmp_path / "clone/data/ml1m.rda").touch()
    return put(
        tmp_path,
        sas_to_original_items="1 10\n2 20\n3 30\n4 40\n",
        sas_to_original_users="1 7\n2 8\n",
        datasets__ml1m__train__input="1 2\n3\n",
        datasets__ml1m__test__output="4\n1\n",
        datasets__ml1m__val__input="",
        datasets__ml1m__val__output="",
    )


def test_ml1m_joins_sequences_and_ratings(fetched: Path) -> None:
    table = ml1m._ratings(fetched)
    assert table["user"].tolist() == [7, 7, 7, 7, 8, 8]
    assert table["item"].tolist() == [10, 20, 30, 40, 30, 10]  # 30 is in no file: it stands before the last
    assert table["sas_item"].tolist() == [1, 2, 3, 4, 3, 1]
    assert table["position"].tolist() == [0, 1, 2, 3, 0, 1]
    assert table["rating"].tolist() == [5, 1, 3, 2, 2, 4]


def test_ml1m_refuses_sequences_of_other_ratings(fetched: Path) -> None:
    put(fetched, datasets__ml1m__train__input="1\n3\n")  # two of user 7's movies are missing
    with pytest.raises(ValueError, match="user 7"):
        ml1m._ratings(fetched)


def test_ml1m_says_how_to_get_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"git clone .*ml1m-sas-mapping"):
        ml1m._ratings(tmp_path)
    with pytest.raises(ValueError, match="3 rows and the published set 4"):
        files.expect("rows", 3, 4)


def test_the_last_tenth_of_each_user_is_held_out() -> None:
    part = ml1m.split(np.repeat([5, 2, 9], [30, 3, 11]))
    assert part[:30].tolist() == [0] * 24 + [1] * 3 + [2] * 3
    assert part[30:33].tolist() == [0, 1, 2]
    assert part[33:].tolist() == [0] * 9 + [1, 2]


def test_no_statistic_holds_the_label_of_its_row() -> None:
    generator = np.random.default_rng(0)
    user = np.repeat(np.arange(30), 20)
    item = np.concatenate([generator.permutation(50)[:20] for _ in range(30)])
    rating = generator.integers(1, 6, 600)
    training = ml1m.split(user) == 0
    before = ml1m.statistics(user, item, rating, training)
    mean = rating[training].mean()
    for row in (0, 7, 219, 599):
        earlier = rating[row - row % 20 : row]
        others = rating[training & (item == item[row]) & (user % ml1m.FOLDS != user[row] % ml1m.FOLDS)]
        assert before["user_mean"][row] == pytest.approx((earlier.sum() + 10 * mean) / (len(earlier) + 10), rel=1e-6)
        assert before["movie_mean"][row] == pytest.approx((others.sum() + 10 * mean) / (len(others) + 10), rel=1e-6)
        assert before["movie_ratings"][row] == pytest.approx(np.log1p(len(others)), rel=1e-6)
    changed = rating.copy()
    changed[100] = 6 - changed[100]
    after = ml1m.statistics(user, item, changed, training)
    drift = abs(changed[training].mean() - mean) * 10 / 10  # the prior is a mean of all training ratings
    for name, values in before.items():
        assert abs(after[name][100] - values[100]) <= drift + 1e-6


def test_amazon_negatives_are_items_that_the_user_does_not_have() -> None:
    user, item = np.repeat([3, 8], [4, 2]), np.array([1, 2, 3, 4, 1, 5])
    for seed in range(20):
        drawn = amazon.negatives(user, item, np.random.default_rng(seed))
        assert set(drawn[:4]) == {5}
        assert set(drawn[4:]) <= {2, 3, 4}


def test_amazon_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amazon, "SIZES", {"Beauty": (2, 5, 7)})
    put(tmp_path, data__Beauty="1 1 2 3\n2 4 1 5 2\n")
    (tmp_path / "data/Beauty_item2attributes.json").write_text('{"1": [7], "2": []}')
    amazon.prepare("Beauty", tmp_path, tmp_path / "out")
    rows = {name: pq.read_table(tmp_path / f"out/{name}.parquet").to_pylist() for name in ("train", "valid", "test")}
    bought = {name: [(row["user"], row["item"]) for row in each if row["label"]] for name, each in rows.items()}
    assert bought == {"train": [(1, 1), (2, 4), (2, 1)], "valid": [(1, 2), (2, 5)], "test": [(1, 3), (2, 2)]}
    assert [len(each) for each in rows.values()] == [6, 4, 4]


def test_gowalla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gowalla, "SIZES", {"train": 3, "valid": 1, "test": 0})
    put(tmp_path, data__gowalla__train="0 5 6\n1 5\n", data__gowalla__valid="0 7\n1\n", data__gowalla__test="0\n")
    gowalla.prepare(tmp_path, tmp_path / "out")
    expected = {"user": [0, 0, 1], "item": [5, 6, 5], "request": [0, 1, 2], "split": [0] * 3, "checked_in": [1] * 3}
    assert pq.read_table(tmp_path / "out/train.parquet").to_pydict() == expected
    expected = {"user": [0], "item": [7], "request": [0], "split": [1], "checked_in": [1]}
    assert pq.read_table(tmp_path / "out/valid.parquet").to_pydict() == expected


def test_sessions_hold_their_target_last_and_pickles_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "SIZES", {"Tmall": (4, 1)})
    monkeypatch.setattr(sessions, "VALID", 1 / 3)
    folder = tmp_path / "datasets/Tmall"
    folder.mkdir(parents=True)
    (folder / "all_train_seq.txt").write_bytes(pickle.dumps([[4, 5, 6], [7, 8], [9, 4]]))
    (folder / "test.txt").write_bytes(pickle.dumps(([[4, 9]], [6])))
    sessions.prepare("Tmall", tmp_path, tmp_path / "out")
    tables = {name: pq.read_table(tmp_path / f"out/{name}.parquet").to_pydict() for name in ("train", "valid", "test")}
    assert tables["train"] == {"session": [0, 0, 0, 1, 1], "item": [4, 5, 6, 7, 8], "position": [0, 1, 2, 0, 1]}
    assert tables["valid"] == {"session": [2, 2], "item": [9, 4], "position": [0, 1]}
    assert tables["test"] == {"session": [3, 3, 3], "item": [4, 9, 6], "position": [0, 1, 2]}
    (folder / "test.txt").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(pickle.UnpicklingError, match="only lists of numbers"):
        sessions.prepare("Tmall", tmp_path, tmp_path / "out")


def test_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["amazon_toys", "--from", str(tmp_path)]) == 1
    assert "git clone --depth 1 https://github.com/RUCAIBox/CIKM2020-S3Rec" in capsys.readouterr().err

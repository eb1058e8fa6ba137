"""MovieLens: the bundled data and the official layouts, held against a plain reading of the same ratings."""

from __future__ import annotations

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from modules.batch import RequestBatch
from train.config.schema import MovieLensConfig
from train.data import build_source
from train.data.movielens import BUILTIN, PRIOR

SPLITS = ("train", "valid", "test")
COLUMNS = ("user", "movie", "rating", "time")


@pytest.fixture(scope="module")
def ratings() -> dict[str, np.ndarray]:
    table = pq.read_table(BUILTIN / "ratings.parquet")
    return {name: column.to_numpy() for name, column in zip(COLUMNS, table, strict=True)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build_source(MovieLensConfig(cache_dir=str(tmp_path_factory.mktemp("cache")), max_history=30))


def words(source, table) -> np.ndarray:
    """Text of each row of an embedding table, from the saved vocabulary."""
    return np.array(["?", *pq.read_table(source.folder / "vocabulary" / f"{table}.parquet")["value"].to_pylist()])


def read(source, table, ids) -> list[str]:
    return words(source, table)[ids.numpy()].tolist()


def leaks(batch: RequestBatch, source, ratings: dict[str, np.ndarray]) -> list[int]:
    """Requests whose history is not exactly the newest of the user's ratings before the first candidate's second.

    Reads nothing but the batch's rows and the ratings themselves.
    """
    movies, scores, found = words(source, "movie"), words(source, "rating"), []
    vocabulary = set(movies.tolist())
    lengths = batch.history_times["rated"].lengths().tolist()
    movie = np.split(movies[batch.histories["rated.movie"].values().numpy()], np.cumsum(lengths)[:-1])
    score = np.split(scores[batch.histories["rated.rating"].values().numpy()], np.cumsum(lengths)[:-1])
    times = batch.history_times["rated"].values().split(lengths)
    offsets = batch.candidate_offsets.tolist()
    for request in range(batch.num_requests):
        rows = batch.row[offsets[request] : offsets[request + 1]].numpy()
        user, moment = ratings["user"][rows[0]], ratings["time"][rows].min()
        earlier = np.flatnonzero((ratings["user"] == user) & (ratings["time"] < moment))
        earlier = earlier[np.argsort(ratings["time"][earlier], kind="stable")][-30:]
        same = (
            times[request].tolist() == ratings["time"][earlier].tolist()
            and movie[request].tolist() == [str(m) if str(m) in vocabulary else "?" for m in ratings["movie"][earlier]]
            and score[request].tolist() == [f"{r:g}" for r in ratings["rating"][earlier]]
        )
        if not same:
            found.append(request)
    return found


@pytest.mark.parametrize("split", SPLITS)
def test_no_history_holds_the_present_or_the_future_and_a_planted_leak_is_caught(source, ratings, split):
    requests = np.random.default_rng(0).choice(source.num_requests(split), 800, replace=False)
    assert leaks(source.batch(split, requests), source, ratings) == []
    ends = source._arrays["history.rated.ends"]
    rows = source.meta["bounds"][split][0] + requests[[3, 500]]
    leaking = ends.copy()
    leaking[rows] += 1  # one event more: the candidate itself, or one of the same second
    source._arrays["history.rated.ends"] = leaking
    try:
        assert leaks(source.batch(split, requests), source, ratings) == [3, 500]
    finally:
        source._arrays["history.rated.ends"] = ends


def test_every_rating_is_a_candidate_once_and_splits_follow_time(source, ratings):
    batches = {split: source.batch(split, np.arange(source.num_requests(split))) for split in SPLITS}
    rows = np.concatenate([batches[split].row for split in SPLITS])
    assert np.array_equal(np.sort(rows), np.arange(len(ratings["user"])))
    sizes = [batches[split].num_candidates / len(rows) for split in SPLITS]
    np.testing.assert_allclose(sizes, [0.8, 0.1, 0.1], atol=1e-3)
    starts = [batches[split].request_time for split in SPLITS]
    assert starts[0].max() <= starts[1].min() <= starts[1].max() <= starts[2].min()
    for batch in batches.values():
        picked = {name: values[batch.row] for name, values in ratings.items()}
        assert batch.labels[:, 0].tolist() == (picked["rating"] >= 4).tolist()
        assert batch.labels[:, 1].tolist() == (picked["rating"] == 5).tolist()
        owner = batch.owner.numpy()
        late = picked["time"] - batch.request_time.numpy()[owner]
        assert (late.min(), late.max()) == (0, 60)
        assert batch.candidate_offsets.diff().max() == source.spec.max_candidates == 8
        assert batch.candidate_offsets.diff().min() == 1
        # One user a request, and one group number a user.
        users = picked["user"].tolist()
        assert len({*zip(users, batch.group.tolist(), strict=True)}) == len(set(users))
    rates = source.label_rates()
    assert rates["like"] == pytest.approx(batches["train"].labels[:, 0].mean().item())
    assert rates["love"] == pytest.approx(batches["train"].labels[:, 1].mean().item())


def test_statistics_are_those_of_earlier_ratings(source, ratings):
    everything = source.batch("train", np.arange(source.num_requests("train")))
    for numbers in (everything.request_dense.double(), everything.candidate_dense.double()):
        np.testing.assert_allclose(numbers.mean(0), 0, atol=1e-3)
        np.testing.assert_allclose(numbers.std(0), 1, atol=1e-3)
    prior = ratings["rating"][everything.row.numpy()].mean(dtype=np.float64)
    numeric = source.meta["numeric"]
    for split in SPLITS:
        requests = np.random.default_rng(1).choice(source.num_requests(split), 100, replace=False)
        batch = source.batch(split, requests)
        owner, moments = batch.owner.numpy(), batch.request_time.numpy()
        first = batch.row[batch.candidate_offsets[:-1]].numpy()

        def expected(key, row, moment, names):
            earlier = (ratings[key] == ratings[key][row]) & (ratings["time"] < moment)
            count, total = earlier.sum(), ratings["rating"][earlier].sum(dtype=np.float64)
            values = [np.log1p(count), (total + PRIOR * prior) / (count + PRIOR)]
            return [(v - numeric[n]["mean"]) / numeric[n]["std"] for v, n in zip(values, names, strict=True)]

        users = [expected("user", row, moments[r], source.spec.request_dense) for r, row in enumerate(first)]
        asked = zip(batch.row.numpy(), moments[owner], strict=True)
        movies = [expected("movie", row, moment, source.spec.candidate_dense) for row, moment in asked]
        np.testing.assert_allclose(batch.request_dense, users, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(batch.candidate_dense, movies, rtol=1e-4, atol=1e-4)


def test_features_of_a_known_movie_and_moment(source, ratings):
    toy_story = np.flatnonzero(ratings["movie"] == 1)[0]
    everything = source.batch("train", np.arange(source.num_requests("train")))
    (candidate,) = np.flatnonzero(everything.row == toy_story)
    request = int(everything.owner[candidate])
    batch = source.batch("train", np.array([request]))
    at = candidate - int(everything.candidate_offsets[request])
    genres = batch.candidate_sparse["genres"]
    ids = genres.values().split(genres.lengths().tolist())[at]
    assert sorted(read(source, "genre", ids)) == ["Adventure", "Animation", "Children", "Comedy", "Fantasy"]
    assert read(source, "year", batch.candidate_sparse["year"].values())[at] == "1995"
    # 964982703 is Sunday 2000-07-30 18:45 UTC.
    assert ratings["time"][toy_story] == 964982703
    assert read(source, "hour", batch.request_sparse["hour"].values()) == ["18"]
    assert read(source, "weekday", batch.request_sparse["weekday"].values()) == ["6"]
    assert source.locate(int(toy_story)).endswith("ratings.parquet, row 1")
    assert "(no genres listed)" not in words(source, "genre")
    assert source.spec.tables["movie"] == len(words(source, "movie"))


def write_layout(folder, layout: str) -> None:
    rows = [(1, 10, 4, 100), (2, 10, 5, 90), (1, 20, 3, 2000), (2, 30, 1, 3000), (1, 30, 5, 9000)]
    movies = [
        (10, "Caf\u00e9: the Film (1995)", "Drama|War"),
        (20, "Alone (2001)", "Drama"),
        (30, "No Year", "(no genres listed)"),
    ]
    if layout == "1m":
        files = {"ratings": rows, "movies": movies, "users": [(1, "F", 25, 10, "48067"), (2, "M", 35, 7, "0a1")]}
        for name, lines in files.items():
            text = "\n".join("::".join(map(str, line)) for line in lines) + "\n"
            (folder / f"{name}.dat").write_bytes(text.encode("latin-1"))
    else:
        for name, header, lines in (
            ("ratings", "userId,movieId,rating,timestamp", [(u, m, float(r), t) for u, m, r, t in rows]),
            ("movies", "movieId,title,genres", [(m, f'"{title}"', genres) for m, title, genres in movies]),
        ):
            (folder / f"{name}.csv").write_text(
                "\n".join([header, *(",".join(map(str, line)) for line in lines)]) + "\n"
            )


@pytest.mark.parametrize("layout", ["1m", "latest"])
def test_official_layouts(tmp_path, layout):
    write_layout(tmp_path, layout)
    source = build_source(MovieLensConfig(path=str(tmp_path), cache_dir=str(tmp_path / "cache"), split=[1.0, 0.0, 0.0]))
    batch = source.batch("train", np.arange(source.num_requests("train")))
    assert batch.row.tolist() == [1, 0, 2, 3, 4]
    assert batch.labels.tolist() == [[1, 1], [1, 0], [0, 0], [0, 0], [1, 1]]
    assert read(source, "movie", batch.candidate_sparse["movie"].values()) == ["10", "10", "20", "30", "30"]
    assert read(source, "year", batch.candidate_sparse["year"].values()) == ["1995", "1995", "2000", "?", "?"]
    assert batch.candidate_sparse["genres"].lengths().tolist() == [2, 2, 1, 0, 0]
    assert batch.history_times["rated"].lengths().tolist() == [0, 0, 1, 1, 2]
    names = [feature.name for feature in source.spec.request]
    assert names == ["user", "hour", "weekday"] + (["gender", "age", "occupation"] if layout == "1m" else [])
    if layout == "1m":
        assert read(source, "gender", batch.request_sparse["gender"].values()) == ["M", "F", "F", "M", "F"]


def test_a_bad_rating_is_named(tmp_path):
    write_layout(tmp_path, "latest")
    ratings = tmp_path / "ratings.csv"
    ratings.write_text(re.sub("4.0", "four", ratings.read_text()))
    config = MovieLensConfig(path=str(tmp_path), cache_dir=str(tmp_path / "cache"), split=[1.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"ratings\.csv, row 1: column 'rating' is four"):
        build_source(config)
    config.bad_rows, config.max_skipped = "skip", 0.2
    source = build_source(config)
    assert source.batch("train", np.arange(source.num_requests("train"))).row.tolist() == [1, 2, 3, 4]


def test_builtin_is_found_from_any_directory_and_has_its_licence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build_source(MovieLensConfig()).num_requests("train") > 20_000
    assert (tmp_path / ".cache").is_dir()
    assert "redistribute" in (BUILTIN / "GROUPLENS_README.txt").read_text()

"""MovieLens in its official layouts: 1M/10M (`ratings.dat`, `::`) and 20M/25M/32M/latest (`ratings.csv`).

Tasks: `like`, a rating of 4 or more, and `love`, a rating of 5. A request is a user at a moment, with the hour and day
of the week (UTC) and, in 1M, gender, age and occupation; a candidate is a movie with its genres and five-year bucket
of release. The history is one stream of all earlier ratings with the rating as an aligned field, rather than one stream
of liked and one of disliked movies: attention can weigh a movie by its rating, ten ratings say more than two signs, and
the order of all events is kept.

Numeric features are computed from ratings strictly before the request's second, whoever gave them: how many ratings the
user has given and the movie has got (log(1 + n)), and their mean, drawn to the training mean by `PRIOR` pseudo-ratings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modules.batch import EventType, FeatureSpec, SparseFeature
from train.config.schema import MovieLensConfig
from train.data.features.columns import Coded, CodedLists, coded_integers, relabel
from train.data.histories import from_rows
from train.data.prepare import Dense, standardise, write
from train.data.requests import IN_WINDOW, Requests, earlier_events, group_requests
from train.data.storage import store
from train.data.storage.files import Layout
from train.data.storage.rows import Join, RowFiles, Rows

BUILTIN = Path(__file__).resolve().parents[2] / "data" / "ml-latest-small"
PRIOR = 10.0
NO_GENRES = "(no genres listed)"
USER_ATTRIBUTES = ("gender", "age", "occupation")

RATINGS = ["userId", "movieId", "rating", "timestamp"]
MOVIES = ["movieId", "title", "genres"]
USERS = ["userId", *USER_ATTRIBUTES, "zip"]


def cache_folder(config: MovieLensConfig) -> Path:
    """Where this data set is prepared."""
    return store.cache_folder(config, list(_files(config).values()))


def prepare(config: MovieLensConfig, folder: Path) -> None:
    """Write the prepared form of the data set into a folder."""
    files = _files(config)
    rows = _read(config, files)
    user, movie = rows.required_ids("userId"), rows.required_ids("movieId")
    time = rows.milliseconds("timestamp", "s")
    rating = rows.numbers("rating")
    rows.flag(np.isnan(rating), "rating", "expected a number")
    attributes = USER_ATTRIBUTES if "users" in files else ()
    columns: dict[str, Coded | CodedLists] = {
        "user": user,
        "hour": coded_integers(time // 3_600_000 % 24),
        "weekday": coded_integers((time // 86_400_000 + 3) % 7),  # 1970 began on a Thursday; Monday is 0
        **{name: rows.ids(name) for name in attributes},
        "movie": movie,
        "genres": _without(rows.lists("genres", "|"), NO_GENRES),
        "year": _release_bucket(rows.ids("title")),
        "rating": rows.ids("rating"),
    }
    rows.finish()
    rows.report(config.max_skipped)
    good = np.flatnonzero(~rows.bad)
    requests = group_requests(
        good,
        user.codes,
        time,
        request=None,
        split_of=np.full(len(rows), -1),
        window=config.request_window,
        max_candidates=config.max_candidates or IN_WINDOW,
        split=config.split,
    )
    with np.errstate(invalid="ignore"):
        labels = np.stack([rating >= 4, rating >= 5], 1).astype(np.float32)
    write(
        folder,
        config,
        _feature_spec(config, attributes),
        rows.table,
        requests,
        user=user.codes,
        time=time,
        columns=columns,
        labels=labels,
        dense=_statistics(good, user.codes, movie.codes, time // 1000, rating, requests),
        histories={"rated": from_rows(good, user.codes, time, requests)},
    )


def _files(config: MovieLensConfig) -> dict[str, Path]:
    folder = BUILTIN if config.path == "builtin" else Path(config.path).expanduser()
    for suffix in ("parquet", "csv", "dat"):
        files = {name: folder / f"{name}.{suffix}" for name in ("ratings", "movies", "users")}
        if files["ratings"].is_file() and files["movies"].is_file():
            return {name: file for name, file in files.items() if file.is_file()}
    held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no such folder"
    raise ValueError(
        f"data.path={config.path!r} is no MovieLens folder (expected ratings and movies as .csv, .dat or .parquet): "
        f"{held}"
    )


def _read(config: MovieLensConfig, files: dict[str, Path]) -> Rows:
    wanted = {*RATINGS, "title", "genres"}
    joins = [Join([files["movies"]], "movieId", "movieId", _layout(files["movies"], MOVIES))]
    if "users" in files:
        wanted |= set(USER_ATTRIBUTES)
        joins.append(Join([files["users"]], "userId", "userId", _layout(files["users"], USERS)))
    return RowFiles([files["ratings"]], wanted, _layout(files["ratings"], RATINGS), config.bad_rows, joins).whole()


def _layout(file: Path, names: list[str]) -> Layout:
    if file.suffix == ".dat":
        return Layout("::", names, encoding="latin-1", quoted=False)
    return Layout()


def _without(lists: CodedLists, value: str) -> CodedLists:
    """The lists with one value taken out of them."""
    kept = ~Coded(lists.codes, lists.values).isin([value])
    offsets = np.append(0, np.cumsum(kept))[lists.offsets]
    return CodedLists(lists.codes[kept], offsets, lists.values)


def _release_bucket(title: Coded) -> Coded:
    """The five years that hold the year at a title's end, "Heat (1995)"; titles without one are missing."""
    year = pc.struct_field(pc.extract_regex(title.values, r"\((?P<year>\d{4})\)\s*$"), "year").cast(pa.int32())
    return relabel(title.codes, pc.multiply(pc.divide(year, 5), 5).cast(pa.string()))


def _feature_spec(config: MovieLensConfig, attributes: tuple[str, ...]) -> FeatureSpec:
    fields = (SparseFeature("movie", "movie"), SparseFeature("rating", "rating"), SparseFeature("year", "year"))
    request = tuple(SparseFeature(name, name) for name in ("user", "hour", "weekday", *attributes))
    candidate = (SparseFeature("movie", "movie"), SparseFeature("year", "year"), SparseFeature("genres", "genre", True))
    return FeatureSpec(
        tables=dict.fromkeys([feature.table for feature in (*request, *candidate, *fields)], 0),
        request=request,
        candidate=candidate,
        histories=(EventType("rated", fields, config.max_history),),
        request_dense=("user_ratings", "user_mean"),
        candidate_dense=("movie_ratings", "movie_mean"),
        tasks=("like", "love"),
        max_candidates=config.max_candidates or IN_WINDOW,
    )


def _statistics(
    good: np.ndarray, user: np.ndarray, movie: np.ndarray, seconds: np.ndarray, rating: np.ndarray, requests: Requests
) -> Dense:
    """Counts and smoothed means of earlier ratings, standardised over the training split."""
    training = requests.rows("train")
    prior = float(rating[training].mean())
    first, order = requests.first, requests.order
    request_second = np.repeat(seconds[first], np.diff(requests.offsets))

    def earlier(owner: np.ndarray, asked: np.ndarray, moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        events = good[np.lexsort((seconds[good], owner[good]))]
        starts, ends = earlier_events(owner[events], seconds[events], asked, moment)
        total = np.append(0.0, np.cumsum(rating[events]))
        count = ends - starts
        return np.log1p(count), (total[ends] - total[starts] + PRIOR * prior) / (count + PRIOR)

    user_count, user_mean = earlier(user, user[first], seconds[first])
    movie_count, movie_mean = earlier(movie, movie[order], request_second)
    num_requests = requests.bounds["train"][1]
    features, statistics = {}, {}
    for name, values, sample in (
        ("user_ratings", user_count, num_requests),
        ("user_mean", user_mean, num_requests),
        ("movie_ratings", movie_count, len(training)),
        ("movie_mean", movie_mean, len(training)),
    ):
        features[name], statistics[name] = standardise(values, np.arange(sample))
    return Dense(
        np.stack([features["user_ratings"], features["user_mean"]], 1),
        np.stack([features["movie_ratings"], features["movie_mean"]], 1),
        statistics,
    )

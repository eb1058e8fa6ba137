"""MovieLens-1M in SASRec's version (999,611 ratings, 6,040 users, 3,416 movies) with ratings, genres and demographics.

SASRec's files have the order of each user's movies, which the next-item tables are computed on, and no ratings; they
come from a copy of the ratings without times. Each user's movies must agree between the two. Absolute times are not
in any of them, so a rating's `position` among the user's stands for its time (0 is the oldest).

Files: `ratings` (user, item: MovieLens' movie id, sas_item: SASRec's 1 to 3,416, position, rating), the same rows split
for ranking in `train`, `valid` and `test`: the last tenth of each user's ratings tests, the tenth before it validates;
`request` there is the row in training and 0 elsewhere, which makes one request of all that a user has held out;
`movies` (item, genres, year: five years in which it came out) and `users` (user, gender, age, occupation).

The split files have statistics, too. A user's are of the ratings before (`user_ratings`, their number, and `user_mean`,
their mean); a movie's (`movie_ratings`, `movie_mean`) of training ratings of nine tenths of all users, to which the
user of the row does not belong: a row's own label is in no statistic of it. Means are drawn to that of all training
ratings by `PRIOR` pseudo-ratings; numbers n are log(1 + n).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, integers, write

PRIOR = 10.0
FOLDS = 10
SAS, MAPPING, RATINGS = "asash/gSASRec-pytorch", "asash/ml1m-sas-mapping", "Stat990-033/Timings"
ATTRIBUTES = "https://files.grouplens.org/datasets/movielens/ml-1m.zip"


def prepare(folder: Path, out: Path) -> None:
    """Write the tables. Raises ValueError when sequences and ratings do not agree."""
    ratings = _ratings(folder)
    expect("ratings", len(ratings["user"]), 999_611)
    expect("users", len(np.unique(ratings["user"])), 6_040)
    expect("movies", len(np.unique(ratings["item"])), 3_416)
    write(out, "ratings", ratings)
    part = split(ratings["user"])
    rows = ratings | statistics(ratings["user"], ratings["item"], ratings["rating"], part == 0)
    for index, name in enumerate(("train", "valid", "test")):
        columns = {key: column[part == index] for key, column in rows.items()}
        number = len(columns["user"])
        write(out, name, columns | {"request": np.arange(number) if index == 0 else np.zeros(number, np.int64)})
    write(out, "movies", _movies(find(folder, "movies.dat", ATTRIBUTES)))
    write(out, "users", _users(find(folder, "users.dat", ATTRIBUTES)))


def split(user: np.ndarray) -> np.ndarray:
    """[N] 0, 1 or 2: training, validation, test. Rows of a user are together and in order."""
    _, start, count = np.unique(user, return_index=True, return_counts=True)
    order = np.argsort(start)
    counts = np.repeat(count[order], count[order])
    from_end = np.concatenate([np.arange(n, 0, -1) for n in count[order]])
    tenth = np.maximum(counts // 10, 1)
    return np.where(from_end <= tenth, 2, np.where(from_end <= 2 * tenth, 1, 0))


def statistics(user: np.ndarray, item: np.ndarray, rating: np.ndarray, training: np.ndarray) -> dict[str, np.ndarray]:
    """[N] float32 each; rows of a user are together and in order."""
    rating = rating.astype(np.float64)
    mean = rating[training].mean()
    _, owner = np.unique(user, return_inverse=True)
    starts = np.flatnonzero(np.append(True, user[1:] != user[:-1]))
    place = np.arange(len(user)) - np.repeat(starts, np.diff(np.append(starts, len(user))))
    total = np.append(0.0, np.cumsum(rating))
    so_far = total[np.arange(len(user))] - np.repeat(total[starts], np.diff(np.append(starts, len(user))))

    _, movie = np.unique(item, return_inverse=True)
    fold = owner % FOLDS
    counts, sums = np.zeros((2, FOLDS, movie.max() + 1))
    np.add.at(counts, (fold[training], movie[training]), 1.0)
    np.add.at(sums, (fold[training], movie[training]), rating[training])
    count = (counts.sum(0) - counts)[fold, movie]
    others = (sums.sum(0) - sums)[fold, movie]
    columns = {
        "user_ratings": np.log1p(place),
        "user_mean": (so_far + PRIOR * mean) / (place + PRIOR),
        "movie_ratings": np.log1p(count),
        "movie_mean": (others + PRIOR * mean) / (count + PRIOR),
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}


def _ratings(folder: Path) -> dict[str, np.ndarray]:
    """SASRec's sequences with the rating of each movie, users one after the other, each oldest first."""
    items = {sas: movie for sas, movie, *_ in integers(find(folder, "sas_to_original_items.txt", clone(MAPPING)))}
    users = {sas: user for sas, user, *_ in integers(find(folder, "sas_to_original_users.txt", clone(MAPPING)))}
    sas_of = {movie: sas for sas, movie in items.items()}
    stars: dict[int, dict[int, int]] = {}
    for user, movie, rating in _rated(find(folder, "data/ml1m.rda", clone(RATINGS))):
        if movie in sas_of:
            stars.setdefault(user, {})[sas_of[movie]] = rating

    def numbers(path: str) -> list[list[int]]:
        return integers(find(folder, f"datasets/ml1m/{path}.txt", clone(SAS)))

    held_out = {
        tuple(row[:-1]): (row[-1], *last) for row, last in zip(numbers("val/input"), numbers("val/output"), strict=True)
    }
    rows = []
    for number, (known, last) in enumerate(zip(numbers("train/input"), numbers("test/output"), strict=True), 1):
        user = users[number]
        sequence = [*known, *held_out.get(tuple(known), ()), last[0]]
        left = Counter(stars[user].keys()) - Counter(
            sequence
        )  # for most users the files leave one out, the last but one
        if len(left) > 1 or len(set(sequence)) < len(sequence) or not set(sequence) <= stars[user].keys():
            raise ValueError(f"user {user}: the sequence and the ratings do not agree")
        sequence[-1:-1] = left
        rows += [(user, items[sas], sas, place, stars[user][sas]) for place, sas in enumerate(sequence)]
    columns = np.array(rows, dtype=np.int32).T
    return dict(zip(("user", "item", "sas_item", "position", "rating"), columns, strict=True))


def _rated(file: Path) -> list[tuple[int, int, int]]:
    """(user, movie, rating) of an R data file."""
    try:
        import pyreadr
    except ImportError as error:
        raise ImportError(f"{file} is an R file, for which pyreadr is needed: pip install pyreadr") from error
    table = pyreadr.read_r(file)["ml1m"]
    return [(int(user), int(movie), int(rating)) for user, movie, rating in zip(table.G, table.H, table.Y, strict=True)]


def _movies(file: Path) -> dict[str, np.ndarray | list[list[str]]]:
    rows = [line.split("::") for line in file.read_text(encoding="latin-1").splitlines() if line]
    years = [re.search(r"\((\d{4})\)\s*$", title) for _, title, _ in rows]
    return {
        "item": np.array([int(movie) for movie, _, _ in rows]),
        "year": np.array([int(year[1]) // 5 * 5 if year else 0 for year in years]),
        "genres": [genres.split("|") for _, _, genres in rows],
    }


def _users(file: Path) -> dict[str, np.ndarray | list[list[str]]]:
    rows = [line.split("::") for line in file.read_text(encoding="latin-1").splitlines() if line]
    columns = list(zip(*rows, strict=True))
    names = ("gender", "age", "occupation")
    return {"user": np.array([int(user) for user in columns[0]])} | {
        name: np.array(column) for name, column in zip(names, columns[1:], strict=False)
    }

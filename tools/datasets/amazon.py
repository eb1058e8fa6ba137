"""Amazon Beauty, Sports and Toys (5-core, 2014) as S3-Rec published them: each user's items in order, without times.

`events` (user, item, position) is what next-item tables are computed on: a user's last item tests, the one before it
validates. `items` has each item's attributes. For ranking, `train`, `valid` and `test` have each event with label 1 and
beside it, with label 0, an item that the user never bought, drawn evenly with a fixed seed, as DIN's authors did.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, integers, write

REPOSITORY = "RUCAIBox/CIKM2020-S3Rec"
SIZES = {
    "Beauty": (22_363, 12_101, 198_502),
    "Sports_and_Outdoors": (35_598, 18_357, 296_337),
    "Toys_and_Games": (19_412, 11_924, 167_597),
}
"""Users, items and events of each."""


def prepare(category: str, folder: Path, out: Path) -> None:
    """Write the tables of one category."""
    rows = integers(find(folder, f"data/{category}.txt", clone(REPOSITORY)))
    lengths = np.array([len(row) - 1 for row in rows])
    user = np.repeat([row[0] for row in rows], lengths)
    item = np.concatenate([row[1:] for row in rows])
    position = np.concatenate([np.arange(length) for length in lengths])
    for what, found, published in zip(
        ("users", "items", "events"), (len(rows), len(np.unique(item)), len(item)), SIZES[category], strict=True
    ):
        expect(what, found, published)
    write(out, "events", {"user": user, "item": item, "position": position})
    attributes = json.loads(find(folder, f"data/{category}_item2attributes.json", clone(REPOSITORY)).read_text())
    write(
        out,
        "items",
        {
            "item": np.array([int(name) for name in attributes]),
            "attributes": [[str(each) for each in values] for values in attributes.values()],
        },
    )
    from_end = np.repeat(lengths, lengths) - 1 - position
    other = negatives(user, item, np.random.default_rng(0))
    for name, of_split in (("train", from_end > 1), ("valid", from_end == 1), ("test", from_end == 0)):
        columns = {
            "user": (user, user),
            "item": (item, other),
            "position": (position, position),
            "label": (np.ones_like(item), np.zeros_like(item)),
        }
        write(out, name, {key: np.concatenate([each[of_split] for each in pair]) for key, pair in columns.items()})


def negatives(user: np.ndarray, item: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """For each event an item that its user has in no event, drawn evenly from all items."""
    items = np.unique(item)
    span = int(items.max()) + 1
    taken = np.unique(user * np.int64(span) + item)
    drawn = generator.choice(items, len(user))
    while (again := np.flatnonzero(np.isin(user * np.int64(span) + drawn, taken))).size:
        drawn[again] = generator.choice(items, again.size)
    return drawn

"""Gowalla_m1, the split of the LightGCN papers and of BARS' matching table: `train`, `valid`, `test` of (user, item).

Check-ins without order or times: for tables of collaborative filtering, Recall@20 and NDCG@20 over the catalogue. The
number of the split, `split`, stands for the time. `request` is the row in training, and 0 elsewhere, so that what
belongs to a user there is one request. `checked_in`, the label, is 1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, integers, write

REPOSITORY = "geon0325/LightGCNpp"
SIZES = {"train": 719_081, "valid": 91_047, "test": 217_242}


def prepare(folder: Path, out: Path) -> None:
    """Write the three tables."""
    for number, (split, published) in enumerate(SIZES.items()):
        rows = integers(find(folder, f"data/gowalla/{split}.txt", clone(REPOSITORY)))
        user = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
        item = np.array([item for row in rows for item in row[1:]])
        expect(f"{split} check-ins", len(item), published)
        request = np.arange(len(item)) if split == "train" else np.zeros(len(item), np.int64)
        constants = {"split": np.full(len(item), number), "checked_in": np.ones(len(item), np.int8)}
        write(out, split, {"user": user, "item": item, "request": request} | constants)

"""Gowalla_m1, the split of the LightGCN papers and of BARS' matching table: `train`, `valid`, `test` of (user, item).

Check-ins without order or times: for tables of collaborative filtering, Recall@20 and NDCG@20 over the catalogue.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, integers, write

REPOSITORY = "geon0325/LightGCNpp"
SIZES = {"train": 719_081, "valid": 91_047, "test": 217_242}


def prepare(folder: Path, out: Path) -> None:
    """Write the three tables."""
    for split, published in SIZES.items():
        rows = integers(find(folder, f"data/gowalla/{split}.txt", clone(REPOSITORY)))
        user = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
        item = np.array([item for row in rows for item in row[1:]])
        expect(f"{split} check-ins", len(item), published)
        write(out, split, {"user": user, "item": item})

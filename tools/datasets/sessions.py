"""Anonymous sessions of Diginetica, Nowplaying and Tmall as GCE-GNN published them.

`train` and `test` have session, item and position.
Each test session's last item is to be predicted from those before it, over the whole catalogue: P@20 and MRR@20. The
published tables train on every prefix of a training session.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, write

REPOSITORY = "CCIIPLab/GCE-GNN"
SIZES = {"diginetica": (719_470, 60_858), "Nowplaying": (825_304, 89_824), "Tmall": (351_268, 25_898)}
"""Prefixes of training sessions, and test sessions."""


def prepare(name: str, folder: Path, out: Path) -> None:
    """Write the two tables of one set."""
    training = _lists(find(folder, f"datasets/{name}/all_train_seq.txt", clone(REPOSITORY)))
    prefixes, last = _lists(find(folder, f"datasets/{name}/test.txt", clone(REPOSITORY)))
    expect("training prefixes", sum(len(session) - 1 for session in training), SIZES[name][0])
    expect("test sessions", len(last), SIZES[name][1])
    write(out, "train", _table(training))
    write(out, "test", _table([[*prefix, item] for prefix, item in zip(prefixes, last, strict=True)]))


def _table(sessions: list[list[int]]) -> dict[str, np.ndarray]:
    lengths = [len(session) for session in sessions]
    return {
        "session": np.repeat(np.arange(len(sessions)), lengths),
        "item": np.concatenate(sessions),
        "position": np.concatenate([np.arange(length) for length in lengths]),
    }


class _Plain(pickle.Unpickler):
    """Reads lists and numbers alone: a pickle can run any code otherwise."""

    def find_class(self, module: str, name: str) -> None:
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}; only lists of numbers are read")


def _lists(file: Path) -> list:
    with file.open("rb") as opened:
        return _Plain(opened).load()

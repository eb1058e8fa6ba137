"""Anonymous sessions of Diginetica, Nowplaying and Tmall as GCE-GNN published them.

`train`, `valid` and `test` have session, item and position; no number of a session is in two of them. Each session's
last item is to be predicted from those before it, over the whole catalogue: P@20 and MRR@20. The published training
sessions stand in the order of time, and the last tenth of them is `valid`; published tables train on it, too. Of a test
session every prefix is a session of its own.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from tools.datasets.files import clone, expect, find, write

REPOSITORY = "CCIIPLab/GCE-GNN"
SIZES = {"diginetica": (719_470, 60_858), "Nowplaying": (825_304, 89_824), "Tmall": (351_268, 25_898)}
"""Prefixes of training sessions, and test sessions."""
VALID = 0.1
"""Share of the training sessions, the newest."""


def prepare(name: str, folder: Path, out: Path) -> None:
    """Write the three tables of one set."""
    training = _lists(find(folder, f"datasets/{name}/all_train_seq.txt", clone(REPOSITORY)))
    prefixes, last = _lists(find(folder, f"datasets/{name}/test.txt", clone(REPOSITORY)))
    expect("training prefixes", sum(len(session) - 1 for session in training), SIZES[name][0])
    expect("test sessions", len(last), SIZES[name][1])
    end = len(training) - round(VALID * len(training))
    write(out, "train", _table(training[:end], 0))
    write(out, "valid", _table(training[end:], end))
    test = [[*prefix, item] for prefix, item in zip(prefixes, last, strict=True)]
    write(out, "test", _table(test, len(training)))


def _table(sessions: list[list[int]], first: int) -> dict[str, np.ndarray]:
    """`first`: the number of the first session."""
    lengths = [len(session) for session in sessions]
    return {
        "session": np.repeat(first + np.arange(len(sessions)), lengths),
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

"""The signal of `data.signal=network`: logits of a fixed random network, of which a larger model catches more.

The logit of a task is BIAS + SCALE / sqrt(5) times the sum of five parts, each standardised over all examples and with
a sign of its own in each task:

    pairs    the sum over all pairs of categorical features of the dot products of their ids' latent vectors
    numbers  a two-layer network of tanh units over the numbers of request and candidate
    long     attention of the candidate over each type's events, in the whole history
    short    another attention over each type's SHORT newest events
    product  what it reads of one event type, times what it reads of the next

Attention is softmax(SHARPNESS s(candidate's category, event's category)) times v(candidate's category, event's
category). Latent vectors, s and v are of rank RANK with a spectrum that falls as 1 / sqrt(number): narrow models can
learn the leading directions alone. Averages of histories say little of it, because s and v are different matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from train.data.batch import Events, ranges

BIAS, SCALE = -1.0, 1.7
RANK, UNITS = 24, 64
SHARPNESS, SHORT = 1.5, 6
GAIN = 2.0  # of the deviation of what a tanh sees
SPECTRUM = (np.arange(1, RANK + 1) ** -0.5 / np.sqrt((1 / np.arange(1, RANK + 1)).sum())).astype(np.float32)

Effects = Callable[[str, np.ndarray, int], np.ndarray]
"""(name, ids [N], columns) -> [N, columns] standard normal numbers that belong to each id."""


class RandomNetwork:
    """Parts of the logits as functions of what requests hold; tables are drawn once, by `effects`."""

    def __init__(self, effects: Effects, num_categories: int, num_types: int, num_numbers: int) -> None:
        self._effects = effects
        categories = np.arange(num_categories)

        def relation(name: str) -> np.ndarray:
            """[candidate's category, event's category], elements of variance 1."""
            left, right = (effects(f"{name} {side}", categories, RANK) for side in ("candidate", "event"))
            return (left * SPECTRUM) @ right.T

        self._long = [(relation(f"long s {e}"), relation(f"long v {e}")) for e in range(num_types)]
        self._short = [(relation(f"short s {e}"), relation(f"short v {e}")) for e in range(num_types)]
        self._first = GAIN * effects("numbers first", np.arange(num_numbers), UNITS) / max(1, num_numbers) ** 0.5
        self._second = GAIN * effects("numbers second", np.arange(UNITS), UNITS) / UNITS**0.5
        self._last = effects("numbers last", np.arange(UNITS), 1)[:, 0]

    def logits(self, parts: np.ndarray, num_tasks: int) -> np.ndarray:
        """[C, tasks] float32, of standardised parts [C, 5]."""
        signs = np.where(self._effects("signs", np.arange(num_tasks), parts.shape[1]) < 0, -1.0, 1.0)
        return (BIAS + SCALE * parts @ signs.T / parts.shape[1] ** 0.5).astype(np.float32)

    def plain(self, ids: Mapping[str, np.ndarray], numbers: np.ndarray) -> np.ndarray:
        """[C, 2]: pairs and numbers, of ids [C] by feature and numbers [C, n]."""
        latent = [self._latent(name, each) for name, each in ids.items()]
        total = np.sum(latent, 0)
        pairs = ((total**2 - np.sum([each**2 for each in latent], 0)) @ SPECTRUM) / 2
        hidden = np.tanh(np.tanh(numbers @ self._first) @ self._second)
        return np.stack([pairs, hidden @ self._last], 1)

    def _latent(self, name: str, ids: np.ndarray) -> np.ndarray:
        """[C, RANK]; ids that occur often are drawn once."""
        unique, place = np.unique(ids, return_inverse=True)
        return self._effects(f"latent {name}", unique, RANK)[place]

    def of_histories(self, owner: np.ndarray, category: np.ndarray, events: Sequence[Events]) -> np.ndarray:
        """[C, 3]: long, short and product, for candidates of requests `owner` [C] and categories `category` [C]."""
        if not events:
            return np.zeros((len(owner), 3))
        long = np.stack([_attend(owner, category, e, *self._long[i], None) for i, e in enumerate(events)])
        short = np.stack([_attend(owner, category, e, *self._short[i], SHORT) for i, e in enumerate(events)])
        return np.stack([long.sum(0), short.sum(0), (long * np.roll(long, 1, 0)).sum(0)], 1)


def _attend(
    owner: np.ndarray, category: np.ndarray, events: Events, scores: np.ndarray, values: np.ndarray, newest: int | None
) -> np.ndarray:
    """[C]: what candidates read of their requests' events, oldest first; 0 of none."""
    ends, counts = np.cumsum(events.lengths)[owner], events.lengths[owner]
    if newest is not None:
        counts = np.minimum(counts, newest)
    reader = np.repeat(np.arange(len(owner)), counts)
    pair = category[reader] * scores.shape[1] + events.fields[1][ranges(ends - counts, counts)]
    weights = np.exp(SHARPNESS * scores).ravel()[pair]
    read = np.bincount(reader, weights * values.ravel()[pair], len(owner))
    return read / np.maximum(np.bincount(reader, weights, len(owner)), 1e-9)

"""A stream of requests of any size with a planted, learnable signal and no disk.

Whatever is in a request is a pure function of (seed, split, request number): counters run through SplitMix64, so
nothing depends on which requests share a batch, on ranks or on workers. Users and items are numbered by popularity (0
leads) and drawn from a Zipf law cut at the table's end; item i belongs to category i mod num_categories. Their rows in
the embedding tables are in no such order.

The signal. Every request has three interest categories of its own, which nothing but its histories shows: six events
in ten come from them, and so does every other candidate. The logit of a task is

    a bias + the sum over event types e of w[task, e] * (share of the request's events of type e that are in the
    candidate's category)
    + item quality + the dot product of a user's and an item's latent vector + small effects of features and numbers,

where each task listens most to one event type. A model that cannot match the candidate with the history is left with
the last line. With `data.signal=network` labels follow `train.data.random_network` instead.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from modules.batch import EventType, FeatureSpec, RequestBatch, SparseFeature
from train.config.schema import SyntheticConfig
from train.data.batch import Events, Ids, pack, ranges
from train.data.features.vocabulary import GOLDEN, splitmix64
from train.data.random_network import RandomNetwork
from train.data.requests import SPLITS

INTERESTS = 3
EVENTS_OF_INTEREST, CANDIDATES_OF_INTEREST = 154, 128  # of 256
LATENT = 4
ZIPF = 1.05  # exponent of the popularity of ids
NUM_DENSE = 8  # numbers of requests, and as many of candidates
CONTEXT_ROWS = 1000  # ids of each feature beyond user, item and category
START = 1_600_000_000  # second of the first training request; they come one a second
EVENT_GAP = 256  # seconds between two events of one type, on average
BIAS, STRONG, WEAK, QUALITY, EFFECT = -2.0, 9.0, 3.0, 0.5, 0.2

POPULATION = (
    "seed",
    "num_users",
    "num_items",
    "num_categories",
    "event_types",
    "num_request_features",
    "num_candidate_features",
)
"""Settings that, with the tasks, decide what an id means for a label; others say how often it comes and with what."""


@dataclass
class _Draw:
    """Everything about some requests. Ids count from 0 here."""

    request_ids: list[np.ndarray]
    candidate_ids: list[np.ndarray]
    counts: np.ndarray  # [R] candidates
    request_dense: np.ndarray
    candidate_dense: np.ndarray
    time: np.ndarray
    events: list[Events]
    plain: np.ndarray  # [C, tasks] logits from ids and numbers; of a random network its first two parts
    history: np.ndarray  # [C, tasks] what histories add to the logits; of a random network its other parts
    label_uniform: np.ndarray  # [C, tasks]


class SyntheticSource:
    """Requests made up on demand; see the module's text."""

    shuffled = True

    def __init__(self, config: SyntheticConfig) -> None:
        if config.num_request_features < 1 or config.num_candidate_features < 2:
            raise ValueError(
                "a synthetic request has at least its user and a candidate its item and category: set "
                "data.num_request_features >= 1 and data.num_candidate_features >= 2"
            )
        if config.num_items < 2 * config.num_categories:
            raise ValueError(
                f"data.num_items={config.num_items} must be at least twice data.num_categories={config.num_categories}"
            )
        if unknown := sorted(config.history_scale.keys() - set(config.event_types)):
            raise ValueError(
                f"data.history_scale names {unknown[0]!r}; data.event_types are {', '.join(config.event_types)}, e.g. "
                f"+data.history_scale.{config.event_types[0] if config.event_types else 'click'}=0.5"
            )
        if not all(scale > 0 and math.isfinite(scale) for scale in config.history_scale.values()):
            raise ValueError(f"data.history_scale={config.history_scale} must be positive numbers, e.g. 0.5")
        self.config = config
        item, category = SparseFeature("item", "item"), SparseFeature("category", "category")
        contexts = _numbered("context", config.num_request_features - 1)
        attributes = _numbered("attribute", config.num_candidate_features - 2)
        self.spec = FeatureSpec(
            tables={
                "user": config.num_users + 1,
                "item": config.num_items + 1,
                "category": config.num_categories + 1,
                **dict.fromkeys([*contexts, *attributes], CONTEXT_ROWS + 1),
            },
            request=tuple(SparseFeature(name, name) for name in ("user", *contexts)),
            candidate=(item, category, *(SparseFeature(name, name) for name in attributes)),
            histories=tuple(
                EventType(name, (item, category), max(1, int(config.max_history * config.history_scale.get(name, 1.0))))
                for name in config.event_types
            ),
            request_dense=tuple(_numbered("request_number", NUM_DENSE)),
            candidate_dense=tuple(_numbered("candidate_number", NUM_DENSE)),
            tasks=tuple(config.tasks),
            max_candidates=1 if config.copy_requests else config.candidates,
        )
        self._seed = np.array([config.seed], np.uint64)
        self.network: RandomNetwork | None = None
        if config.signal == "network":
            numbers = 2 * NUM_DENSE
            self.network = RandomNetwork(self._effects, config.num_categories, len(config.event_types), numbers)

    @property
    def fingerprint(self) -> str:
        population = [*(getattr(self.config, name) for name in POPULATION), NUM_DENSE, self.config.tasks]
        if self.network is not None:
            population.append(self.config.signal)
        text = json.dumps(["popular rows apart", *population])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    extends = None
    """None: a source with more users is another population."""

    oov_rows = 0

    def keep_mapping(self, run_dir: Path) -> None:
        """Nothing is kept: the configuration says everything."""

    def num_requests(self, split: str) -> int:
        if split == "train":
            return self.config.num_requests
        return self.config.eval_requests or max(1, self.config.num_requests // 10)

    def lengths(self, split: str, requests: np.ndarray) -> np.ndarray:
        key = self._key(split, requests)
        events = enumerate(self.spec.histories)
        total = np.zeros(len(key), np.int64)
        total = sum((self._lengths(self._event_key(key, i), event) for i, event in events), total)
        return total * self._counts(key) if self.config.copy_requests else total

    def locate(self, row: int) -> str:
        return f"synthetic request {row // self.config.candidates}, candidate {row % self.config.candidates}"

    def label_bounds(self) -> dict[str, tuple[float, float, bool]]:
        return {}

    def label_rates(self) -> dict[str, float]:
        return self._label_rates

    def statistics(self) -> dict[str, dict[str, Any]]:
        return {}

    def check(self) -> None:
        """Nothing is read that could change."""

    def missing(self) -> dict[str, float]:
        return {}

    @cached_property
    def _label_rates(self) -> dict[str, float]:
        """Mean probability over the first 4,096 training requests: a second's work where histories are long."""
        logits = self.bayes_logits("train", np.arange(min(4096, self.config.num_requests)))
        return dict(zip(self.spec.tasks, _sigmoid(logits).mean(0).tolist(), strict=True))

    def bayes_logits(self, split: str, requests: np.ndarray, histories: bool = True) -> np.ndarray:
        """[C, tasks] float32: the logits that labels are drawn from, or those without what the histories add."""
        return self._logits(self._draw(split, requests), histories)

    def _logits(self, draw: _Draw, histories: bool = True) -> np.ndarray:
        if self.network is None:
            return draw.plain + draw.history if histories else draw.plain
        mean, deviation = self._moments
        parts = (np.concatenate([draw.plain, draw.history], 1) - mean) / deviation
        if not histories:
            parts[:, draw.plain.shape[1] :] = 0
        return self.network.logits(parts, len(self.config.tasks))

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and deviations of a random network's parts over the first 4,096 training requests."""
        draw = self._draw("train", np.arange(min(4096, self.config.num_requests)))
        parts = np.concatenate([draw.plain, draw.history], 1)
        return parts.mean(0), np.maximum(parts.std(0), 1e-6)

    def batch(self, split: str, requests: np.ndarray) -> RequestBatch:
        draw = self._draw(split, requests)
        probability = _sigmoid(self._logits(draw))
        batch = pack(
            self.spec,
            request=[Ids(rows) for rows in self._rows(self.spec.request, draw.request_ids)],
            candidate=[Ids(rows) for rows in self._rows(self.spec.candidate, draw.candidate_ids)],
            request_dense=draw.request_dense,
            candidate_dense=draw.candidate_dense,
            histories=[
                replace(events, fields=self._rows(event.fields, events.fields))
                for event, events in zip(self.spec.histories, draw.events, strict=True)
            ],
            request_time=draw.time,
            candidate_counts=draw.counts,
            labels=draw.label_uniform < probability,
            group=np.repeat(draw.request_ids[0], draw.counts),
            row=ranges(np.asarray(requests, np.int64) * self.config.candidates, draw.counts),
        )
        return batch.expand() if self.config.copy_requests else batch

    def _rows(self, features: Sequence[SparseFeature], ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Rows, from 1 on, of each feature's ids in its table. Popular ones lie apart, as they do in the order of a
        vocabulary: every shard of a table that is split by rows has its share of them.
        """
        sizes = [self.spec.tables[feature.table] - 1 for feature in features]
        return [values * _stride(size) % size + 1 for values, size in zip(ids, sizes, strict=True)]

    def _draw(self, split: str, requests: np.ndarray) -> _Draw:
        config, spec = self.config, self.spec
        number, split_index = np.asarray(requests, np.int64), SPLITS.index(split)
        key = self._key(split, requests)
        time = START + number + sum(self.num_requests(name) for name in SPLITS[:split_index])
        counts = self._counts(key)
        owner = np.repeat(np.arange(len(number)), counts)
        candidate = _mix(_bits(key, "candidate")[owner], ranges(np.zeros(len(counts)), counts).astype(np.uint64))

        interests = _below(_bits(key, "interests", INTERESTS), config.num_categories)
        user = _zipf(_uniform(_bits(key, "user")), config.num_users, ZIPF)
        item, category = self._items(candidate, interests, owner, CANDIDATES_OF_INTEREST)
        contexts = [_below(_bits(key, feature.name), CONTEXT_ROWS) for feature in spec.request[1:]]
        item_key = _mix(self._seed, item.astype(np.uint64))
        attributes = [_below(_bits(item_key, feature.name), CONTEXT_ROWS) for feature in spec.candidate[2:]]
        request_dense = _normal(_bits(key, "dense", NUM_DENSE))
        candidate_dense = _normal(_bits(candidate, "dense", NUM_DENSE))

        drawn = [
            self._history(self._event_key(key, index), event, interests, time)
            for index, event in enumerate(spec.histories)
        ]
        events = [each for each, _ in drawn]
        named = dict(zip((feature.name for feature in spec.request[1:]), (ids[owner] for ids in contexts), strict=True))
        named |= dict(zip((feature.name for feature in spec.candidate[2:]), attributes, strict=True))
        numbers = np.concatenate([request_dense[owner], candidate_dense], 1)
        if self.network is None:
            plain = self._plain(user[owner], item, named, numbers)
            history = self._matches(owner, category, drawn)
        else:
            ids = {"user": user[owner], "item": item, "category": category, **named}
            plain, history = self.network.plain(ids, numbers), self.network.of_histories(owner, category, events)
        return _Draw(
            request_ids=[user, *contexts],
            candidate_ids=[item, category, *attributes],
            counts=counts,
            request_dense=request_dense,
            candidate_dense=candidate_dense,
            time=time,
            events=events,
            plain=plain.astype(np.float32),
            history=history.astype(np.float32),
            label_uniform=_uniform(_bits(candidate, "label", len(config.tasks))),
        )

    def _plain(
        self, user: np.ndarray, item: np.ndarray, named: dict[str, np.ndarray], numbers: np.ndarray
    ) -> np.ndarray:
        """[C, tasks] logits without histories, of each candidate's ids [C], and numbers [C, n]."""
        tasks = len(self.config.tasks)
        affinity = self._effects("user", user, LATENT) * self._effects("item", item, LATENT)
        plain = BIAS + QUALITY * (affinity.sum(1, keepdims=True) / LATENT**0.5 + self._effects("quality", item, tasks))
        for name, ids in named.items():
            plain += EFFECT * self._effects(name, ids, tasks)
        plain += EFFECT * numbers @ self._effects("dense", np.arange(numbers.shape[1]), tasks)
        return plain

    def _matches(
        self, owner: np.ndarray, category: np.ndarray, drawn: Sequence[tuple[Events, np.ndarray]]
    ) -> np.ndarray:
        """[C, tasks]: what the histories' shares of each candidate's category add to its logits."""
        logits = np.zeros((len(owner), len(self.config.tasks)), np.float32)
        for index, (history, matches) in enumerate(drawn):
            share = matches[owner, category] / np.maximum(history.lengths, 1)[owner]
            for task in range(logits.shape[1]):
                logits[:, task] += (STRONG if task % len(drawn) == index else WEAK) * share
        return logits

    def _key(self, split: str, requests: np.ndarray) -> np.ndarray:
        numbers = np.asarray(requests, np.int64).astype(np.uint64)
        return _mix(self._seed, np.array([SPLITS.index(split)], np.uint64), numbers)

    def _counts(self, key: np.ndarray) -> np.ndarray:
        """Candidates of each request."""
        return np.full(len(key), self.config.candidates)

    def _event_key(self, key: np.ndarray, index: int) -> np.ndarray:
        return _mix(key, np.array([index], np.uint64))

    def _lengths(self, key: np.ndarray, event: EventType) -> np.ndarray:
        """Events of one type that each request has."""
        sigma = self.config.history_sigma
        mean = self.config.mean_history * self.config.history_scale.get(event.name, 1.0)
        length = np.exp(np.log(mean) - sigma**2 / 2 + sigma * _normal(_bits(key, "length")))
        return np.minimum(length, event.max_length).astype(np.int64)

    def _history(
        self, key: np.ndarray, event: EventType, interests: np.ndarray, time: np.ndarray
    ) -> tuple[Events, np.ndarray]:
        """(events of one type, how many of them each request has in each category [R, num_categories])."""
        num_categories, lengths = self.config.num_categories, self._lengths(key, event)
        owner = np.repeat(np.arange(len(key)), lengths)
        age = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(owner)) - 1  # 0 is the newest
        bits = splitmix64(key[owner] + age.astype(np.uint64) * GOLDEN)
        item, category = self._items(bits, interests, owner, EVENTS_OF_INTEREST)
        jitter = (bits >> np.uint64(16)).astype(np.int64) % EVENT_GAP
        times = time[owner] - 1 - age * EVENT_GAP - jitter
        matches = np.bincount(owner * num_categories + category, minlength=len(key) * num_categories)
        return Events([item, category], times, lengths), matches.reshape(len(key), num_categories)

    def _items(
        self, bits: np.ndarray, interests: np.ndarray, owner: np.ndarray, of_interest: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(item, category): popular items, moved into one of the owner's interests in `of_interest` cases of 256."""
        item, low = _zipf(_uniform(bits), self.config.num_items, ZIPF), bits.astype(np.uint32)
        category = item % self.config.num_categories
        wanted = interests.ravel()[owner * INTERESTS + (low >> 8) % 256 * INTERESTS // 256]
        wanted = np.where(low % 256 < of_interest, wanted, category)
        item += wanted - category
        return np.where(item < self.config.num_items, item, item - self.config.num_categories), wanted

    def _effects(self, name: str, ids: np.ndarray, columns: int) -> np.ndarray:
        """[N, columns] standard normal numbers that belong to each id in every request."""
        return _normal(_bits(_mix(self._seed, ids.astype(np.uint64)), name, columns))


@cache
def _stride(size: int) -> int:
    """Coprime to `size` and near its golden section, so that its multiples modulo `size` lie evenly apart."""
    stride = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}_{index}" for index in range(count)]


@cache
def _stream(name: str) -> np.ndarray:
    """[1] A constant of the name, so that draws of different purposes are independent."""
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint64)


def _mix(bits: np.ndarray, *counters: np.ndarray) -> np.ndarray:
    """uint64 that depends on every argument; arguments broadcast."""
    for counter in counters:
        bits = splitmix64((bits + counter + np.uint64(1)) * GOLDEN)
    return bits


def _bits(key: np.ndarray, name: str, columns: int | None = None) -> np.ndarray:
    """[N] or [N, columns] random bits of each key for one purpose."""
    bits = _mix(key, _stream(name))
    return bits if columns is None else _mix(bits[:, None], np.arange(columns, dtype=np.uint64))


def _uniform(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) out of the upper 32 bits; the lower ones stay free for other draws."""
    return (bits >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _below(bits: np.ndarray, bound: int) -> np.ndarray:
    """int64 in [0, bound), bound <= 2^32."""
    return ((bits >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def _normal(bits: np.ndarray) -> np.ndarray:
    """float32 standard normal (Box and Muller 1958)."""
    radius = np.sqrt(-2 * np.log1p(-_uniform(bits)))
    return (radius * np.cos(2 * np.pi * _uniform(bits << np.uint64(32)))).astype(np.float32)


def _zipf(uniform: np.ndarray, size: int, exponent: float) -> np.ndarray:
    """int64 in [0, size): the inverse distribution function of the density x^-exponent on [1, size + 1), floored."""
    top, power = np.log(size + 1.0), 1 - exponent
    if abs(power) < 1e-6:
        rank = np.exp(uniform * top)
    else:
        rank = np.exp(np.log1p(uniform * np.expm1(power * top)) / power)
    return np.minimum(rank.astype(np.int64) - 1, size - 1)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))

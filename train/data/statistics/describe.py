"""Which statistics a configuration has, and the features that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from modules.config import changed
from train.config.schema import EventsConfig, StatisticConfig
from train.data.features.transforms import Transforms
from train.data.storage.rows import comparison

AUTOMATIC = 4
"""Columns of candidates that `auto` counts by: the first ones, and each of them for each user."""
KINDS = ("count", "rate", "recency")

Side = Literal["request", "candidate"]


def statistics(config: EventsConfig) -> dict[str, StatisticConfig]:
    """By name, what `data.statistics` describes. Raises ValueError for a key that there is not."""
    given = config.statistics
    if given in (None, "none"):
        return {}
    if given == "auto":
        return automatic(config)
    if not isinstance(given, Mapping):
        raise ValueError(f"data.statistics={given!r} must be auto, none or a mapping, e.g. {{item: {{by: [item_id]}}}}")
    return described(given, tasks(config))


def described(given: Mapping[str, Any], of: list[str]) -> dict[str, StatisticConfig]:
    """`of`: the tasks of statistics that name none."""
    found = {}
    for name, each in given.items():
        key = f"data.statistics.{name}"
        if not isinstance(each, Mapping) or not each.get("by"):
            raise ValueError(f"{key}={each!r} must name the columns that rows agree in, e.g. {{by: [item_id]}}")
        one = changed(StatisticConfig([]), each, key)
        found[name] = dataclasses.replace(one, of=of if one.of is None and not one.log else one.of or [])
    return found


def automatic(config: EventsConfig) -> dict[str, StatisticConfig]:
    """By user, by the first columns of candidates, and by both; nothing where rows are not of requests over time."""
    timed = config.time and config.split_by == "time" and not config.follow_wait
    if not timed or not tasks(config):
        return {}
    columns = [name for name in config.candidate_categorical if name not in config.display][:AUTOMATIC]
    users = [config.user] if config.user else []
    keys = [*([name] for name in (*users, *columns)), *([user, name] for user in users for name in columns)]
    return {"_".join(by): StatisticConfig(by, of=tasks(config)) for by in keys if len(set(by)) == len(by)}


def tasks(config: EventsConfig) -> list[str]:
    """Tasks whose labels are 0 and 1."""
    return [task for task in config.labels if task not in config.real_labels]


def of_side(config: EventsConfig, side: Side) -> tuple[str, ...]:
    """The features of requests, whose keys are all columns of requests, or of candidates."""
    own = {*config.request_categorical, config.user}
    chosen = {name: each for name, each in statistics(config).items() if own.issuperset(each.by) == (side == "request")}
    return tuple(feature for name, each in chosen.items() for feature in features(name, each))


def features(name: str, each: StatisticConfig) -> dict[str, bool]:
    """The features of a statistic, and whether each is scaled by its logarithm; rates are logits."""
    counted = {f"{name}.count": True} if "count" in each.kinds else {}
    rates = {f"{name}.{task}_rate": False for task in each.of or ()} if "rate" in each.kinds else {}
    recency = {f"{name}.recency": True} if "recency" in each.kinds else {}
    recency |= {f"{name}.{task}_recency": True for task in each.of or ()} if recency else {}
    return counted | rates | recency | {f"{name}.distinct_{column}": True for column in each.distinct}


def all_features(config: EventsConfig) -> dict[str, bool]:
    return {feature: log for name, each in statistics(config).items() for feature, log in features(name, each).items()}


def columns(config: EventsConfig) -> list[str]:
    """The columns of labelled rows that statistics read."""
    return list(dict.fromkeys(name for each in statistics(config).values() for name in row_columns(each)))


def row_columns(each: StatisticConfig) -> list[str]:
    return [*each.by, *([] if each.log else each.distinct)]


def check(config: EventsConfig, taken: set[str]) -> None:
    """`taken`: names of other numbers. Raises ValueError for what cannot be counted."""
    for name, each in statistics(config).items():
        key = f"data.statistics.{name}"
        if not config.time:
            raise ValueError(f"{key} counts earlier rows: data.time must name the time column of the rows")
        if config.follow_wait:
            raise ValueError(f"{key}: counters do not go on in files of data.follow_wait yet; use data.statistics=none")
        if unknown := sorted(set(each.kinds) - set(KINDS)):
            raise ValueError(f"{key}.kinds={each.kinds} has {unknown[0]!r}; there are {', '.join(KINDS)}")
        if unknown := sorted(set(each.of or ()) - set(tasks(config))):
            raise ValueError(
                f"{key}.of={each.of} names {unknown[0]!r}, which is no task with labels of 0 and 1; there are "
                f"{tasks(config)}"
            )
        if each.log and (each.log not in config.histories or not config.histories[each.log].files):
            logs = [event for event, history in config.histories.items() if history.files]
            raise ValueError(f"{key}.log={each.log!r} is no event type of data.histories with files; there are {logs}")
        if each.log and each.of:
            raise ValueError(f"{key} counts entries of {each.log!r}, which have no labels; leave out of={each.of}")
        if each.half_life < 0 or each.smoothing < 0:
            raise ValueError(f"{key}.half_life and smoothing must be at least 0, e.g. half_life: 604800, smoothing: 20")
        if 0 < each.half_life < 1:
            raise ValueError(f"{key}.half_life={each.half_life} must be 0, or at least a second, e.g. 604800")
        inputs = Transforms(config.transforms).inputs
        answers = inputs(comparison(text)[0] for text in config.labels.values())
        if told := sorted(answers & inputs(row_columns(each))):
            raise ValueError(f"{key} names the label column {told[0]!r}, whose value the request does not know")
        made_of = Transforms(config.transforms).made_of
        if fixed := sorted({*each.by, *(part for column in each.by for part in made_of(column))} & {*config.display}):
            raise ValueError(f"{key}.by has {fixed[0]!r}, which requests do not have (data.display); leave it out")
        if not features(name, each):
            raise ValueError(f"{key} makes no number; e.g. kinds: [count, rate]")
        if twice := sorted(taken & set(features(name, each))):
            raise ValueError(f"{key} makes {twice[0]!r}, a column of numbers already; give the statistic another name")

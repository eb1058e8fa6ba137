"""Which columns a description of labelled events names, and the features that they make."""

from __future__ import annotations

from modules.batch import EventType, FeatureSpec, SparseFeature, VectorFeature
from modules.layers.embedding.tokens import table_name
from train.config.schema import EventsConfig, HistoryConfig, VectorConfig
from train.data.features.numeric import numeric_features
from train.data.features.transforms import Transforms
from train.data.requests import IN_WINDOW
from train.data.statistics import describe as statistics
from train.data.storage.rows import comparison
from train.data.vector_tables import vector_tables


def feature_spec(config: EventsConfig) -> FeatureSpec:
    """The features that the configuration names; sizes of tables, and of requests of an id, are not known yet."""

    def sparse(names: list[str], is_list: bool = False) -> tuple[SparseFeature, ...]:
        return tuple(SparseFeature(name, table_of(config, name), is_list) for name in names)

    def vectors_of(columns: dict[str, VectorConfig]) -> tuple[VectorFeature, ...]:
        return tuple(VectorFeature(name, each.width) for name, each in columns.items())

    request = sparse(config.request_categorical) + sparse(config.request_list, True)
    candidate = sparse(config.candidate_categorical) + sparse(config.candidate_list, True)
    vendor = sparse(config.vendor_categorical) + sparse(config.vendor_list, True)
    histories = tuple(EventType(name, sparse(h.fields), config.max_history) for name, h in config.histories.items())
    events = [field for event in histories for field in event.fields]
    used = [feature.table for feature in (*request, *candidate, *events, *vendor)]
    return FeatureSpec(
        tables=dict.fromkeys(used, 0),
        request=request,
        candidate=candidate,
        histories=histories,
        request_dense=_numbers_of(config, config.request_numeric, "request"),
        candidate_dense=_numbers_of(config, config.candidate_numeric, "candidate"),
        tasks=tuple(config.labels),
        max_candidates=max_candidates(config) or 1,
        vendor=vendor,
        vendor_dense=numeric_features(config.vendor_numeric, config.missing_indicator),
        request_vectors=vectors_of(config.request_vectors),
        candidate_vectors=vectors_of(config.candidate_vectors),
        vendor_vectors=vectors_of(config.vendor_vectors),
        vector_tables=vector_tables(config),
    )


def _numbers_of(config: EventsConfig, columns: list[str], side: statistics.Side) -> tuple[str, ...]:
    return (*numeric_features(columns, config.missing_indicator), *statistics.of_side(config, side))


def table_of(config: EventsConfig, column: str) -> str:
    """The table of a column's ids, by default the column's name, or the nearest one that a table can have."""
    given = config.tables.get(column)
    return given if given and "." in given else table_name(given or column)


def max_candidates(config: EventsConfig) -> int | None:
    """Of a request; None: no limit. Rows without a time or a request id cannot be told to belong together."""
    if not (config.time or config.request):
        return 1
    return config.max_candidates or (None if config.request else IN_WINDOW)


def numeric(config: EventsConfig) -> list[str]:
    """Columns of numbers that are features."""
    return [*config.request_numeric, *config.candidate_numeric, *config.vendor_numeric]


def logarithmic(config: EventsConfig) -> set[str]:
    """Numbers, columns or statistics, of which the logarithm is scaled."""
    return {*config.log_numeric, *(name for name, log in statistics.all_features(config).items() if log)}


def known_at(config: EventsConfig, history: HistoryConfig) -> str | None:
    """The column of the time from which an event that is a row is known: that of the label that it is, if no other."""
    if history.lists or history.files:
        return None
    late = {comparison(config.labels[task])[0]: column for task, column in config.known_at.items()}
    return history.known_at or next((late[name] for name in history.where if name in late), None)


def known_columns(config: EventsConfig) -> list[str]:
    """Columns of times from which labels and events are known."""
    of_events = [known_at(config, history) for history in config.histories.values()]
    return list(dict.fromkeys([*config.known_at.values(), *(name for name in of_events if name)]))


def vectors(config: EventsConfig) -> dict[str, VectorConfig]:
    return {**config.request_vectors, **config.candidate_vectors, **config.vendor_vectors}


def numbers(config: EventsConfig) -> list[str]:
    """Every column of numbers: features, those of transforms, labels that are not compared with an id, the weight."""
    labels = [comparison(text) for text in config.labels.values()]
    return [
        *numeric(config),
        *Transforms(config.transforms).number_inputs(),
        *(column for column, sign, _ in labels if sign != "=="),
        *([config.weight] if config.weight else []),
    ]


def features(config: EventsConfig) -> list[str]:
    """Columns of ids that are features themselves."""
    vendor = (*config.vendor_categorical, *config.vendor_list)
    request, candidate = config.request_categorical, config.candidate_categorical
    return [*request, *config.request_list, *candidate, *config.candidate_list, *vendor]


def lists(config: EventsConfig) -> list[str]:
    """Features that are list columns."""
    return [*config.request_list, *config.candidate_list, *config.vendor_list]


def categorical(config: EventsConfig) -> list[str]:
    own = [history for history in config.histories.values() if not (history.lists or history.files)]
    fields = [name for history in own for name in history.fields]
    single = (*config.request_categorical, *config.candidate_categorical, *config.vendor_categorical)
    return list(dict.fromkeys([*single, *fields, *statistics.columns(config)]))


def wanted(config: EventsConfig) -> set[str]:
    """Every column that the configuration names."""
    names = {*categorical(config), *lists(config), *numeric(config), *vectors(config)}
    names |= {comparison(text)[0] for text in config.labels.values()}
    names |= {*known_columns(config)}
    names |= {name for name in (config.weight, config.user, config.time, config.request, config.vendor) if name}
    for history in config.histories.values():
        if history.lists:
            names |= {*history.fields, *([history.times] if history.times else [])}
        elif not history.files:
            names |= set(history.where)
    return names

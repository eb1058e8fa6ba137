"""Options of a configuration: each stands once, as the field of a dataclass, with what is allowed beside it.

Every model has a dataclass `Config` inside its class, a subclass of `ModelConfig`; its parts may have theirs.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Optional, Self, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    Settled = int
    SettledShare = float
    SettledFlag = bool
else:
    Settled = Optional[int]  # noqa: UP045
    SettledShare = Optional[float]  # noqa: UP045
    SettledFlag = Optional[bool]  # noqa: UP045
"""What a run may choose at its start, by the size of its data, where it is null: before anything reads it,
`train.process.length` replaces it."""


def option(
    default: Any,
    *,
    choices: Iterable[str] = (),
    dotted: str = "",
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    example: Any = None,
) -> Any:
    """A field of a dataclass whose value is checked by `check_options`.

    `dotted`, an example of one, lets dotted names stand beside the choices. A list or dict as the default is copied
    for each instance; the limits hold for each element of a list. `example` is
    a value that works, for the error; where there is none, the limit is. A number without `least` must be at least 0.
    """
    limits = {
        "choices": tuple(choices),
        "dotted": dotted,
        "least": least,
        "most": most,
        "below": below,
        "example": example,
        "empty": default == [],
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=limits)
    return dataclasses.field(default=default, metadata=limits)


def check_options(config: Any, path: str) -> None:
    """ValueError, naming the key below `path` and a value that works, for the first value that is not allowed.

    Dataclasses inside `config`, also in lists and mappings, are checked, too. One whose fields must fit each other has
    a `check_at(path)`.
    """
    for field in dataclasses.fields(config):
        key, value, limits = f"{path}.{field.name}", getattr(config, field.name), field.metadata
        for name, part in _dataclasses(value):
            check_options(part, key + name)
        if choices := limits.get("choices"):
            _check_choice(key, value, choices, limits)
        else:
            _check_range(key, value, limits)
    if rules := getattr(config, "check_at", None):
        rules(path)


def refuse(when: object, text: str) -> None:
    """A rule across fields: ValueError with that text where `when` is true."""
    if when:
        raise ValueError(text)


def changed(config: Any, changes: Mapping[str, Any], path: str) -> Any:
    """A copy of a dataclass with other values, mappings for the dataclasses in it. ValueError that names the key below
    `path` for one that it does not have, and for a value of another type."""
    known = [field.name for field in dataclasses.fields(config)]
    types = get_type_hints(type(config))
    values = {}
    for name, value in changes.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ValueError(f"{path}.{name} is no option; {hint}")
        own = getattr(config, name)
        if dataclasses.is_dataclass(own) and isinstance(value, Mapping):
            values[name] = changed(own, value, f"{path}.{name}")
        elif is_of(types[name], value):
            values[name] = value
        else:
            kind = get_args(types[name])[0] if get_origin(types[name]) in (Union, UnionType) else types[name]
            kind = getattr(kind, "__name__", kind)
            works = {} if dataclasses.is_dataclass(own) else "null" if own is None else own
            raise ValueError(f"{path}.{name}={value} must be of type {kind}, e.g. {path}.{name}={works}")
    return dataclasses.replace(config, **values)


def is_of(kind: Any, value: Any) -> bool:
    """Whether a field of that type may have the value. Whole numbers are numbers; true and false are none."""
    if kind is Any:
        return True
    if get_origin(kind) in (Union, UnionType):
        return any(is_of(each, value) for each in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(is_of(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is tuple:  # of any length
        return isinstance(value, tuple) and all(is_of(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(is_of(get_args(kind)[1], each) for each in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def check_types(config: Any, path: str) -> None:
    """ValueError, naming the key below `path`, for a value of another type than its field; also of parts inside."""
    types = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        key, value = f"{path}.{field.name}", getattr(config, field.name)
        if not is_of(types[field.name], value):
            raise ValueError(f"{key}={str(value)[:100]} must be of type {types[field.name]}")
        for name, part in _dataclasses(value):
            check_types(part, key + name)


def from_saved(kind: type[Any], saved: Mapping[str, Any], path: str) -> Any:
    """The inverse of `dataclasses.asdict`, also after JSON: a `kind`, with the dataclasses that its fields have.

    ValueError that names the key below `path` for one that `kind` does not have.
    """
    saved = of_earlier(kind, saved, path)
    types = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(saved) - set(known)):
        raise ValueError(f"{path}.{unknown[0]} is no option; there are {', '.join(known)}")
    return kind(**{name: _restored(types[name], value, f"{path}.{name}", from_saved) for name, value in saved.items()})


def of_earlier(kind: type[Any], saved: Mapping[str, Any], path: str) -> dict[str, Any]:
    """`saved`, also by an earlier version: without the keys of `kind.retired`, and with those of `kind.moved`, by their
    old names, by where they are now. Of dataclasses inside, too, and of what single layers have.

    ValueError, naming the key below `path`, for a retired one with a value that has no effect any more.
    """
    retired, moved, types = getattr(kind, "retired", {}), getattr(kind, "moved", {}), get_type_hints(kind)
    if issubclass(kind, StackConfig):  # whose layers and event types have some of its keys for themselves
        types |= {"layers": GenericAlias(list, (kind,)), "events": GenericAlias(dict, (str, kind))}
    kept = {}
    for key, value in saved.items():
        if key in retired and retired[key] not in (..., value):
            raise ValueError(
                f"{path}.{key}={value} was saved by an earlier version, and there is no such key any more: all do what "
                f"{retired[key]} did; use the version that saved it"
            )
        if key not in retired:
            kept[key] = _restored(types.get(key), value, f"{path}.{key}", of_earlier)
    for key in moved.keys() & kept.keys():
        section, _, name = moved[key].rpartition(".")
        value = kept.pop(key)
        kept |= {section: {name: value} | kept.get(section, {})} if section else {name: value}
    return kept


def _restored(kind: Any, value: Any, path: str, restore: Callable[[type[Any], Any, str], Any]) -> Any:
    """`value` with `restore` applied to what are dataclasses in a field of that type."""
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return restore(cast("type[Any]", kind), value, path)
    inner = get_args(kind)[-1:]
    if inner and isinstance(value, dict):
        return {name: _restored(inner[0], part, f"{path}.{name}", restore) for name, part in value.items()}
    if inner and isinstance(value, list):
        return [_restored(inner[0], part, path, restore) for part in value]
    return value


def _dataclasses(value: Any) -> Iterable[tuple[str, Any]]:
    """(rest of its key, dataclass) for each that `value` is or holds."""
    if dataclasses.is_dataclass(value):
        return [("", value)]
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [(f".{name}", part) for name, part in parts if dataclasses.is_dataclass(part)]


def _check_choice(key: str, value: Any, choices: tuple[str, ...], limits: Mapping[str, Any]) -> None:
    values, dotted = value if isinstance(value, list) else [value], limits["dotted"]
    if dotted:
        values = [each for each in values if "." not in each]
    if not (values or dotted or limits["empty"]) or not set(values) <= {None, *choices}:
        own = f", or give the dotted name of a class, e.g. {dotted}" if dotted else ""
        raise ValueError(f"{key}={value} is not known; choose from {', '.join(choices)}{own}")


def _check_range(key: str, value: Any, limits: Mapping[str, Any]) -> None:
    numbers = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int | float)]
    least = 0 if limits.get("least") is None and not isinstance(value, list) else limits.get("least")
    rules: tuple[tuple[str, float | None, Callable[[float, float], bool]], ...] = (
        ("at least", least, operator.ge),
        ("at most", limits.get("most"), operator.le),
        ("below", limits.get("below"), operator.lt),
    )
    for words, limit, holds in rules:
        if limit is not None and not all(holds(number, limit) for number in numbers):
            works = limit if limits.get("example") is None else limits["example"]
            works = [works] * len(numbers) if isinstance(value, list) else works
            raise ValueError(f"{key}={value} must be {words} {limit}, e.g. {key}={works}")


@dataclasses.dataclass
class TokenConfig:
    """What all parts of a model share."""

    dim: int = option(32, least=1)  # width of every token, and of embedding rows
    dropout: SettledShare = option(0.0, below=1, example=0.1)  # null: by the size of the data; none without a run


@dataclasses.dataclass
class ManagedTable:
    """A table whose rows go to the ids that occur most, out of any number of ids."""

    rows: int = option(0, least=2, example=100_000)
    min_count: int = option(1, least=1)  # occurrences between two reviews from which an id may get a row
    every: int = option(100, least=1)  # steps between reviews, which give rows to ids

    retired: ClassVar[dict[str, Any]] = {"evict": "distance_lfu"}


@dataclasses.dataclass(kw_only=True)
class ModelConfig(TokenConfig):
    """What all models share: the schema of the configuration's group `model`."""

    name: str
    table_dims: dict[str, int] = option({})  # table -> another width of its rows, projected to dim
    managed_tables: dict[str, ManagedTable] = option({})  # tables with fewer rows than ids, which the ids take in turns
    table_std: float | None = None  # of a table's initial rows; null: 1 / sqrt(their width)
    embedding_dropout: float = option(0.0, below=1, example=0.1)  # of the elements of looked-up rows

    retired: ClassVar[dict[str, Any]] = {}  # keys of earlier versions with the value that all now have; ...: any
    moved: ClassVar[dict[str, str]] = {}  # where others are now, as `name` or `section.name`

    def check_at(self, path: str) -> None:
        for table, width in self.table_dims.items():
            if width < 4 or width % 4:
                raise ValueError(
                    f"{path}.table_dims.{table}={width} must be a multiple of 4, which the kernels of tables read at "
                    f"once, e.g. {path}.table_dims.{table}={max(4, width // 4 * 4)}"
                )

    def check(self) -> None:
        """Rules across fields. ValueError that names the key below `model` and a value that works."""

    def of_layers(self) -> list[Self]:
        """The configuration of each layer."""
        return [self]

    def graphs_refusal(self) -> str | None:
        """Which key cannot work with CUDA graphs, why, and what works; None if all can."""
        return None

    def describe_layers(self) -> list[str]:
        """What differs in each layer, as text; empty if the configuration does not tell them apart."""
        return []

    def notes(self) -> list[str]:
        """What a summary of the model says beside its tables."""
        return []


@dataclasses.dataclass(kw_only=True)
class StackConfig(ModelConfig):
    """What models share that are a stack of layers.

    An entry of `layers` overrides keys of the model for its layer: all but `shared` and, of those of every model, but
    `dropout`.
    """

    num_layers: int | None = option(None, least=1, example=2)  # null: as many as layers has, else `usual_layers`
    # what differs in each layer, such as [{dropout: 0.1}, {}]; null: nothing
    layers: list[dict[str, Any]] | None = None

    usual_layers: ClassVar[int] = 2
    shared: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        # So that a saved configuration says how many there are.
        if self.num_layers is None:
            self.num_layers = len(self.layers) if self.layers else self.usual_layers

    @classmethod
    def layer_keys(cls) -> list[str]:
        """The keys that a layer may have for itself."""
        of_stack = {each.name for each in dataclasses.fields(StackConfig)} - {"dropout"}
        of_stack = of_stack.union(*(vars(base).get("shared", ()) for base in cls.__mro__))
        return [each.name for each in dataclasses.fields(cls) if each.name not in of_stack]

    def of_layers(self) -> list[Self]:
        """The configuration of each layer. ValueError that names the key for what a layer cannot have."""
        if not self.layers:  # null, or as earlier versions saved it, an empty list
            return [self] * cast("int", self.num_layers)
        if len(self.layers) != self.num_layers:
            raise ValueError(
                f"model.layers has {len(self.layers)} entries, one a layer, and model.num_layers={self.num_layers}; "
                f"leave out one of the two, or use model.num_layers={len(self.layers)}"
            )
        own = dataclasses.replace(self, layers=None)
        return [
            layer_config(own, changes, f"model.layers.{index}", self.layer_keys())
            for index, changes in enumerate(self.layers)
        ]

    def check(self) -> None:
        super().check()
        for index, layer in enumerate(self.of_layers()):
            try:
                layer.check_layer()
            except ValueError as error:
                raise ValueError(f"model.layers.{index}: {error}" if self.layers else str(error)) from error

    def check_layer(self) -> None:
        """`check` for a layer whose configuration this is."""

    def describe_layers(self) -> list[str]:
        return [shown(changes) for changes in self.layers or []] if any(self.layers or []) else []


@dataclasses.dataclass
class HeadsConfig:
    """Of what attends."""

    num_heads: int = option(2, least=1)


@dataclasses.dataclass(kw_only=True)
class RankingConfig(StackConfig):
    """What stacks of layers with an MLP for each task share."""

    head_hidden: list[int] = option([128, 64], least=1)

    shared: ClassVar[frozenset[str]] = frozenset({"head_hidden"})


@dataclasses.dataclass(kw_only=True)
class TokensConfig(HeadsConfig, RankingConfig):
    """What such models share whose tokens have a width of their own."""

    token_dim: int = option(64, least=1)  # width of tokens; dim is that of features

    shared: ClassVar[frozenset[str]] = frozenset({"token_dim"})


@dataclasses.dataclass(kw_only=True)
class EventStacksConfig(StackConfig):
    """What models share that may have a stack of layers for each event type."""

    event_stacks: str = option("own", choices=["own", "merged"])  # one for each event type | one for all, by time
    # event type -> what differs in its stack: num_layers, layers, or keys of a layer
    events: dict[str, dict[str, Any]] = option({})

    shared: ClassVar[frozenset[str]] = frozenset({"event_stacks", "events"})

    def check(self) -> None:
        if self.events and self.event_stacks == "merged":
            raise ValueError(
                "model.events describes stacks of single event types, and model.event_stacks=merged has one of all; "
                "use model.event_stacks=own"
            )
        super().check()


@dataclasses.dataclass(kw_only=True)
class FeatureTokensConfig(TokensConfig):
    """What such models share whose tokens are made of features."""

    num_tokens: int = option(8, least=1)  # of a candidate, its request's features among them
    tokens: str = option("split", choices=["split", "groups"])  # slices of one product | a group of features each
    expansion: float = option(4.0, example=4.0)  # hidden width of a token's network, in token_dim

    shared: ClassVar[frozenset[str]] = frozenset({"num_tokens", "tokens"})


def layer_config(config: Any, changes: Mapping[str, Any], path: str, keys: Collection[str]) -> Any:
    """`config` with what a layer has for itself, which may be `keys`. ValueError that names the key below `path`."""
    if not isinstance(changes, Mapping):
        raise ValueError(f"{path}={changes} must be a mapping of keys to values; {{}} where nothing differs")
    for name in changes:
        if name in keys:
            continue
        known = name in (each.name for each in dataclasses.fields(config))
        if not known and (close := difflib.get_close_matches(name, keys, 1)):
            raise ValueError(f"{path}.{name} is no key of a layer; did you mean {close[0]}?")
        instead = f"set model.{name} for all, or " if known else ""
        raise ValueError(f"{path}.{name} is no key of a layer; {instead}choose from {', '.join(sorted(keys))}")
    refuse(
        changes.get("dropout", 0) is None,
        f"{path}.dropout=null must be a number, e.g. {path}.dropout=0.1; a layer without the key has the model's",
    )
    layer = changed(config, changes, path)
    check_options(layer, path)
    return layer


def shown(changes: Mapping[str, Any]) -> str:
    """Keys and values as in overrides: `window=64, pffn_gdpa.activation=silu`."""
    parts = []
    for name, value in changes.items():
        if isinstance(value, Mapping):
            parts += [shown({f"{name}.{key}": part}) for key, part in value.items()]
        else:
            text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
            parts.append(f"{name}={text}")
    return ", ".join(parts)

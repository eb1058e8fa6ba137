"""The configuration of Kunlun, and what of it an event type may have for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from modules.config import EventStacksConfig, layer_config, option, shown
from modules.layers.interaction.wukong import WukongConfig
from modules.models.summaries import SummariesConfig

OF_EVENTS = ("dim", "num_heads", "num_layers", "layers", "num_tokens", "num_seeds", "window", "pffn_hidden")
"""Keys that an event type may have for itself."""

INTERACTION = {
    "num_context",
    "num_summary",
    "num_experts",
    "wukong",
    "interaction_hidden",
    "feed_forward",
    "feed_forward_dim",
    "moe",
}
"""Keys of a layer that concern what mixes the event types, so none has them for itself."""

TIME_SCALE = 60.0
"""Seconds: ages count as log(1 + age / TIME_SCALE) in rotations."""


class Work(NamedTuple):
    """What a layer does with the events of a type: the feed-forward network, self and target attention, a summary."""

    pffn: bool
    attention: bool
    pooling: bool


@dataclass(kw_only=True)
class KunlunConfig(EventStacksConfig, SummariesConfig):
    name: str = "kunlun"
    num_summary: int = option(8, least=1)  # X_sum: tokens that X is compressed to for the interaction
    pffn: str = option("gdpa", choices=["gdpa", "linear"])  # the production block | InterFormer's
    rotation: str = option("time", choices=["time", "position", "none"])  # time: by position and age (ROTE)
    pooling: str = option("hsp", choices=["hsp", "pma"])  # num_seeds seeds, compressed | as many seeds as tokens
    num_seeds: int = option(16, least=1)
    kron_terms: int = option(4, least=1)  # of SumKronLinear in hsp; 1: linear compression and a projection
    comp_skip: bool = True  # even layers: PFFN and summary, odd ones: self and target attention; false: all in each
    num_experts: int = option(2, least=1)  # Wukong experts, among which the tokens of the interaction are shared out
    wukong: WukongConfig = field(default_factory=lambda: WukongConfig(num_fmb=4, num_lcb=4))  # of an expert

    shared: ClassVar[frozenset[str]] = frozenset({"rotation", "comp_skip"})
    retired: ClassVar[dict[str, Any]] = WukongConfig.retired | {
        "compute": None,
        "expert_layers": 1,
        "pffn_kron_terms": 0,
        "shared_kv": True,
        "time_scale": TIME_SCALE,
    }
    moved: ClassVar[dict[str, str]] = {
        "rank": "wukong.rank",
        "expert_fmb": "wukong.num_fmb",
        "expert_lcb": "wukong.num_lcb",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        # Earlier versions saved null for what a type does not have for itself.
        given = self.events.items()
        self.events = {name: {key: each for key, each in own.items() if each is not None} for name, own in given}

    def check(self) -> None:
        super().check()
        _check_stack(self, "")
        for name in self.events:
            _check_stack(self, name)

    def describe_layers(self) -> list[str]:
        """With what each layer computes, and what event types have for themselves in it."""
        of_types = {name: own.get("layers") or [] for name, own in self.events.items()}
        if not any(changes for each in [self.layers or [], *of_types.values()] for changes in each):
            return []
        works, texts = works_of(stack_layers(self)), []
        for index, (changes, work) in enumerate(zip(self.layers or [{}] * len(works), works, strict=True)):
            own = [shown({**changes, "computes": [name for name, does in work._asdict().items() if does]})]
            given = {name: layers[index] for name, layers in of_types.items() if layers[index:]}
            own += [f"{name}: {shown(each)}" for name, each in given.items() if each]
            texts.append("; ".join(own))
        return texts


def works_of(layers: Sequence[KunlunConfig]) -> list[Work]:
    """Of a stack of such layers. Under CompSkip even ones run the PFFN and the pooling, odd ones the attentions.

    The last one then also pools; otherwise nothing would read what its attention has made.
    """
    if not layers[0].comp_skip:
        return [Work(True, True, True)] * len(layers)
    last = len(layers) - 1
    return [Work(index % 2 == 0, index % 2 == 1, index % 2 == 0 or index == last) for index in range(len(layers))]


def stack_layers(config: KunlunConfig, event_type: str = "") -> list[KunlunConfig]:
    """The configuration of each layer of an event type's stack, or of the one of all.

    A key is the first that is given of: the type's layer, the type, the model's layer, the model.
    """
    of_model, path = config.of_layers(), f"model.events.{event_type}"
    given = config.events.get(event_type, {})
    layers = [layer_config(layer, given, path, OF_EVENTS) for layer in of_model]
    of_type, number = given.get("layers"), given.get("num_layers")
    if of_type and number not in (None, len(of_type)):
        raise ValueError(
            f"{path}.layers has {len(of_type)} entries, one a layer, and {path}.num_layers={number}; leave "
            f"out one of the two, or use {path}.num_layers={len(of_type)}"
        )
    depth = number or len(of_type or of_model)
    if depth > len(of_model):
        what = f"num_layers={depth}" if number else f"layers, of {depth} entries,"
        raise ValueError(f"{path}.{what} must be at most model.num_layers={len(of_model)}")
    layers = layers[:depth]
    if of_type:
        keys = [key for key in config.layer_keys() if key not in INTERACTION]
        pairs = enumerate(zip(layers, of_type, strict=True))
        layers = [layer_config(layer, each, f"{path}.layers.{index}", keys) for index, (layer, each) in pairs]
    return layers


def _check_stack(config: KunlunConfig, event_type: str) -> None:
    layers = stack_layers(config, event_type)
    where = f"model.events.{event_type}" if event_type else "model"
    for own in layers:
        if own.dim % (2 * own.num_heads):
            pairs = 2 * own.num_heads
            raise ValueError(
                f"{where}.dim={own.dim} must be a multiple of 2 * num_heads={pairs} (rotations turn pairs), e.g. "
                f"{where}.dim={pairs * max(1, own.dim // pairs)}"
            )
    if config.comp_skip and len(layers) < 2:
        raise ValueError(
            f"model.comp_skip=true has self-attention in every second layer: {where}.num_layers={len(layers)} "
            "must be at least 2, or use model.comp_skip=false"
        )


def check_events(events: Iterable[str], event_types: Sequence[str]) -> None:
    """ValueError for event types that the data does not have."""
    if unknown := sorted(set(events) - set(event_types)):
        known = ", ".join(event_types) or "none"
        raise ValueError(f"model.events names {unknown[0]!r}; the event types of the data are {known}")

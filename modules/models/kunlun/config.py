"""The configuration of Kunlun, and what of it an event type may have for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

from modules.config import StackConfig, layer_config, option, shown
from modules.layers.attention.gdpa import GDPAConfig
from modules.layers.feed_forward.block import FeedForwardConfig
from modules.layers.interaction.wukong import WukongConfig, in_section

INTERACTION = {
    "num_context",
    "num_summary",
    "num_experts",
    "expert_layers",
    "expert_fmb",
    "expert_lcb",
    "wukong",
    "interaction_hidden",
    "feed_forward",
    "feed_forward_dim",
    "moe",
}
"""Keys of a layer that concern what mixes the event types, so none has them for itself."""


class Work(NamedTuple):
    """What a layer does with the events of a type: the feed-forward network, self and target attention, a summary."""

    pffn: bool
    attention: bool
    pooling: bool

    def parts(self) -> list[str]:
        return [name for name, does in self._asdict().items() if does]


@dataclass
class EventConfig:
    """The stack of one event type; what is None is the model's own."""

    dim: int | None = option(None, least=1)  # width of its tokens
    num_heads: int | None = option(None, least=1)
    num_layers: int | None = option(None, least=1, example=2)  # after which its last summary stays
    layers: list[dict[str, Any]] | None = None  # what differs in each of its layers; null: nothing
    num_tokens: int | None = option(None, least=1)
    num_seeds: int | None = option(None, least=1)
    window: int | None = option(None)
    pffn_hidden: int | None = option(None, least=1)


@dataclass(kw_only=True)
class KunlunConfig(FeedForwardConfig, StackConfig):
    name: str = "kunlun"
    num_heads: int = option(2, least=1)
    num_context: int = option(8, least=1)  # tokens that a request is compressed to, for the weights of the PFFN
    num_summary: int = option(8, least=1)  # X_sum: tokens that X is compressed to for the interaction
    num_target: int = 2  # tokens in which a candidate attends to each sequence; 0: it does not
    pffn: str = option("gdpa", choices=["gdpa", "linear"])  # the production block | InterFormer's
    pffn_hidden: int = option(32, least=1)  # gdpa: hidden units
    pffn_kron_terms: int = 0  # gdpa: weights are sums of as many Kronecker products; 0: mixed tokens of the context
    # gdpa: activation, normalisation and scales. The sum over hidden units is not averaged: the block's norm follows.
    pffn_gdpa: GDPAConfig = field(default_factory=lambda: GDPAConfig(out_scale=1.0))
    window: int = 64  # self-attention sees |i - j| <= window; 0: the whole sequence
    rotation: str = option("time", choices=["time", "position", "none"])  # time: by position and age (ROTE)
    time_scale: float = option(60.0, example=60.0)  # seconds: ages count as log(1 + age / time_scale)
    shared_kv: bool = True  # one projection of keys and values for self and target attention
    pooling: str = option("hsp", choices=["hsp", "pma"])  # num_seeds seeds, compressed | as many seeds as tokens
    num_seeds: int = option(16, least=1)
    num_tokens: int = option(4, least=1)  # of a sequence's summary
    kron_terms: int = option(4, least=1)  # of SumKronLinear in hsp; 1: linear compression and a projection
    comp_skip: bool = True  # even layers: PFFN and summary, odd ones: self and target attention; false: all in each
    # what a layer computes of each event type, some of pffn, attention, pooling; null: what comp_skip says
    compute: list[str] | None = option(None, choices=Work._fields)
    event_stacks: str = option("own", choices=["own", "merged"])  # one for each event type | one for all, by time
    events: dict[str, EventConfig] = option({})  # event type -> what differs from the keys above
    num_experts: int = option(2, least=1)  # Wukong experts, among which the tokens of the interaction are shared out
    expert_layers: int = option(1, least=1)
    expert_fmb: int = option(4, least=1)  # tokens that an expert's factorisation machine makes
    expert_lcb: int = option(4, least=1)  # tokens that its linear compression makes
    wukong: WukongConfig = field(default_factory=WukongConfig)
    interaction_hidden: list[int] = option([128], least=1)  # of the machines' MLPs
    head_hidden: list[int] = option([128, 64], least=1)

    shared: ClassVar[frozenset[str]] = frozenset(
        {"rotation", "time_scale", "comp_skip", "event_stacks", "events", "head_hidden"}
    )
    moved: ClassVar[dict[str, str]] = in_section()

    def check(self) -> None:
        if not self.time_scale > 0:
            raise ValueError(f"model.time_scale={self.time_scale} must be above 0 seconds, e.g. model.time_scale=60")
        if self.events and self.event_stacks == "merged":
            raise ValueError(
                "model.events describes stacks of single event types, and model.event_stacks=merged has one of all; "
                "use model.event_stacks=own"
            )
        super().check()
        _check_stack(self, "")
        for name in self.events:
            _check_stack(self, name)

    def describe_layers(self) -> list[str]:
        """With what each layer computes, and what event types have for themselves in it."""
        given = [self.layers, *(event.layers for event in self.events.values())]
        if not any(changes for each in given for changes in each or []):
            return []
        works = works_of(stack_layers(self))
        texts = []
        for index, (changes, work) in enumerate(zip(self.layers or [{}] * len(works), works, strict=True)):
            own = [shown({**changes, "compute": work.parts()})]
            for name, event in self.events.items():
                if of_type := (event.layers or [])[index : index + 1]:
                    own += [f"{name}: {shown(each)}" for each in of_type if each]
            texts.append("; ".join(own))
        return texts


def works_of(layers: Sequence[KunlunConfig]) -> list[Work]:
    """Of a stack of such layers. Under CompSkip even ones run the PFFN and the pooling, odd ones the attentions.

    The last one then also pools; otherwise nothing would read what its attention has made.
    """
    works = []
    for index, own in enumerate(layers):
        even = index % 2 == 0
        if own.compute is not None:
            works.append(Work(*(part in own.compute for part in Work._fields)))
        elif own.comp_skip:
            works.append(Work(pffn=even, attention=not even, pooling=even or index == len(layers) - 1))
        else:
            works.append(Work(True, True, True))
    return works


def stack_layers(config: KunlunConfig, event_type: str = "") -> list[KunlunConfig]:
    """The configuration of each layer of an event type's stack, or of the one of all.

    A key is the first that is given of: the type's layer, the type, the model's layer, the model.
    """
    of_model, own = config.of_layers(), config.events.get(event_type, EventConfig())
    path = f"model.events.{event_type}"
    if own.layers and own.num_layers not in (None, len(own.layers)):
        raise ValueError(
            f"{path}.layers has {len(own.layers)} entries, one a layer, and {path}.num_layers={own.num_layers}; leave "
            f"out one of the two, or use {path}.num_layers={len(own.layers)}"
        )
    depth = own.num_layers or len(own.layers or of_model)
    if depth > len(of_model):
        what = f"num_layers={depth}" if own.num_layers else f"layers, of {depth} entries,"
        raise ValueError(f"{path}.{what} must be at most model.num_layers={len(of_model)}")
    changes = {each.name: getattr(own, each.name) for each in fields(own) if each.name not in ("num_layers", "layers")}
    given = {name: value for name, value in changes.items() if value is not None}
    layers = [replace(layer, **given) for layer in of_model[:depth]]
    if own.layers:
        keys = [key for key in config.layer_keys() if key not in INTERACTION]
        pairs = enumerate(zip(layers, own.layers, strict=True))
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
    works = works_of(layers)
    if config.comp_skip and len(layers) < 2 and layers[0].compute is None:
        raise ValueError(
            f"model.comp_skip=true has self-attention in every second layer: {where}.num_layers={len(layers)} "
            "must be at least 2, or use model.comp_skip=false"
        )
    unread = next((index for index, work in reversed(list(enumerate(works))) if work.pooling), -1) + 1
    if unread < len(works):
        raise ValueError(
            f"{where}: nothing reads what layer {unread} computes, since no layer from there on pools; end the stack "
            f"with a layer of compute=[{','.join([*works[-1].parts(), 'pooling'])}]"
        )


def check_events(events: Iterable[str], event_types: Sequence[str]) -> None:
    """ValueError for event types that the data does not have."""
    if unknown := sorted(set(events) - set(event_types)):
        known = ", ".join(event_types) or "none"
        raise ValueError(f"model.events names {unknown[0]!r}; the event types of the data are {known}")

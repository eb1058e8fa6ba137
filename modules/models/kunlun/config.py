"""The configuration of Kunlun, and what of it an event type may have for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace


@dataclass
class EventConfig:
    """The stack of one event type; what is None is the model's own."""

    dim: int | None = None  # width of its tokens
    num_heads: int | None = None
    num_layers: int | None = None  # after which its last summary stays
    num_tokens: int | None = None
    num_seeds: int | None = None
    window: int | None = None
    pffn_hidden: int | None = None


@dataclass
class KunlunConfig:
    dim: int = 32  # width of every token
    dropout: float = 0.0
    num_layers: int = 2  # with comp_skip each does half of the work
    num_heads: int = 2
    num_context: int = 8  # tokens that a request is compressed to, from which the PFFN's weights are made
    num_summary: int = 8  # X_sum: tokens that X is compressed to for the interaction
    num_target: int = 2  # tokens in which a candidate attends to each sequence; 0: it does not
    pffn: str = "gdpa"  # gdpa: the production block | linear: InterFormer's
    pffn_hidden: int = 32  # gdpa: hidden units
    window: int = 64  # self-attention sees |i - j| <= window; 0: the whole sequence
    rotation: str = "time"  # time: by position and age (ROTE) | position | none
    time_scale: float = 60.0  # seconds: ages count as log(1 + age / time_scale)
    shared_kv: bool = True  # one projection of keys and values for self and target attention
    pooling: str = "hsp"  # hsp: num_seeds seeds, compressed to num_tokens | pma: num_tokens seeds
    num_seeds: int = 16
    num_tokens: int = 4  # of a sequence's summary
    kron_terms: int = 4  # of SumKronLinear in hsp; 1: linear compression and a projection
    comp_skip: bool = True  # even layers: PFFN and summary, odd ones: self and target attention; false: all in each
    event_stacks: str = "own"  # own: a sequence and a stack for each event type | merged: one of all events by time
    events: dict[str, EventConfig] = field(default_factory=dict)  # event type -> what differs from the keys above
    num_experts: int = 2  # Wukong experts, among which the tokens of the interaction are shared out
    expert_layers: int = 1
    expert_fmb: int = 4  # tokens that an expert's factorisation machine makes
    expert_lcb: int = 4  # tokens that its linear compression makes
    machine: str = "optimised"  # optimised | plain | attentive, see WukongConfig
    rank: int = 8
    interaction_hidden: list[int] = field(default_factory=lambda: [128])  # of the machines' MLPs
    num_compressed: int = 4  # attentive
    attention_hidden: list[int] = field(default_factory=lambda: [64])  # attentive
    head_hidden: list[int] = field(default_factory=lambda: [128, 64])


CHOICES = {
    "pffn": ("gdpa", "linear"),
    "rotation": ("time", "position", "none"),
    "pooling": ("hsp", "pma"),
    "event_stacks": ("own", "merged"),
}
COUNTS = (
    *("num_layers", "num_heads", "num_context", "num_summary", "pffn_hidden", "num_seeds", "num_tokens", "kron_terms"),
    *("num_experts", "expert_layers", "expert_fmb", "expert_lcb", "rank", "num_compressed"),
)


def check(config: KunlunConfig, event_types: Sequence[str]) -> None:
    """ValueError for values that do not fit, by the name of the key; `event_types` are those of the data."""
    for name, allowed in CHOICES.items():
        if (value := getattr(config, name)) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    for name in COUNTS:
        if (value := getattr(config, name)) < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name in ("num_target", "window"):
        if (value := getattr(config, name)) < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if not config.time_scale > 0:
        raise ValueError(f"time_scale must be above 0 seconds, got {config.time_scale}, e.g. time_scale=60")
    if unknown := sorted(config.events.keys() - set(event_types)):
        known = ", ".join(event_types) or "none"
        raise ValueError(f"events names {unknown[0]!r}; the event types of the data are {known}")
    if config.events and config.event_stacks == "merged":
        raise ValueError("events is for event_stacks=own; with event_stacks=merged all types are in one stack")
    for name in event_types:
        own = of_event(config, name)
        where = f"events.{name}.num_layers" if name in config.events else "num_layers"
        if not 1 <= own.num_layers <= config.num_layers:
            raise ValueError(f"{where}={own.num_layers} must lie in 1..num_layers={config.num_layers}")
        if config.comp_skip and own.num_layers < 2:
            raise ValueError(
                f"comp_skip=true has self-attention in every second layer: {where}={own.num_layers} must be at least "
                "2, or use comp_skip=false"
            )


def of_event(config: KunlunConfig, event_type: str) -> KunlunConfig:
    """The configuration with what an event type has for itself."""
    own = config.events.get(event_type, EventConfig())
    changes = {each.name: getattr(own, each.name) for each in fields(own)}
    return replace(config, **{name: value for name, value in changes.items() if value is not None})

"""The configuration of Kunlun, and what of it an event type may have for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from modules.config import ModelConfig, option
from modules.gdpa import GDPAConfig
from modules.wukong import MACHINES


@dataclass
class EventConfig:
    """The stack of one event type; what is None is the model's own."""

    dim: int | None = option(None, least=1)  # width of its tokens
    num_heads: int | None = option(None, least=1)
    num_layers: int | None = option(None, least=1)  # after which its last summary stays
    num_tokens: int | None = option(None, least=1)
    num_seeds: int | None = option(None, least=1)
    window: int | None = option(None)
    pffn_hidden: int | None = option(None, least=1)


@dataclass(kw_only=True)
class KunlunConfig(ModelConfig):
    name: str = "kunlun"
    num_layers: int = option(2, least=1)  # with comp_skip each does half of the work
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
    event_stacks: str = option("own", choices=["own", "merged"])  # one for each event type | one for all, by time
    events: dict[str, EventConfig] = option({})  # event type -> what differs from the keys above
    num_experts: int = option(2, least=1)  # Wukong experts, among which the tokens of the interaction are shared out
    expert_layers: int = option(1, least=1)
    expert_fmb: int = option(4, least=1)  # tokens that an expert's factorisation machine makes
    expert_lcb: int = option(4, least=1)  # tokens that its linear compression makes
    machine: str = option("optimised", choices=MACHINES)  # products X (X^T Y) | X X^T | with a Y of each candidate
    rank: int = option(8, least=1)  # columns of Y
    interaction_hidden: list[int] = option([128], least=1)  # of the machines' MLPs
    num_compressed: int = option(4, least=1)  # attentive: mixtures of tokens that Y is made from
    attention_hidden: list[int] = option([64], least=1)  # attentive: of the MLP that makes Y
    head_hidden: list[int] = option([128, 64], least=1)

    def check(self) -> None:
        if not self.time_scale > 0:
            raise ValueError(f"model.time_scale={self.time_scale} must be above 0 seconds, e.g. model.time_scale=60")
        if self.events and self.event_stacks == "merged":
            raise ValueError(
                "model.events describes stacks of single event types, and model.event_stacks=merged has one of all; "
                "use model.event_stacks=own"
            )
        self._check_stack("model", self)
        for name in self.events:
            self._check_stack(f"model.events.{name}", of_event(self, name))

    def _check_stack(self, where: str, own: KunlunConfig) -> None:
        if own.dim % (2 * own.num_heads):
            pairs = 2 * own.num_heads
            raise ValueError(
                f"{where}.dim={own.dim} must be a multiple of 2 * num_heads={pairs} (rotations turn pairs), e.g. "
                f"{where}.dim={pairs * max(1, own.dim // pairs)}"
            )
        if own.num_layers > self.num_layers:
            raise ValueError(f"{where}.num_layers={own.num_layers} must be at most model.num_layers={self.num_layers}")
        if self.comp_skip and own.num_layers < 2:
            raise ValueError(
                f"model.comp_skip=true has self-attention in every second layer: {where}.num_layers={own.num_layers} "
                "must be at least 2, or use model.comp_skip=false"
            )


def check_events(config: KunlunConfig, event_types: Sequence[str]) -> None:
    """ValueError for event types that the data does not have."""
    if unknown := sorted(config.events.keys() - set(event_types)):
        known = ", ".join(event_types) or "none"
        raise ValueError(f"model.events names {unknown[0]!r}; the event types of the data are {known}")


def of_event(config: KunlunConfig, event_type: str) -> KunlunConfig:
    """The configuration with what an event type has for itself."""
    own = config.events.get(event_type, EventConfig())
    changes = {each.name: getattr(own, each.name) for each in fields(own)}
    return replace(config, **{name: value for name, value in changes.items() if value is not None})

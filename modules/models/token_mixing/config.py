"""The configuration of token mixing. docs/token_mixing.md says which keys the published models and ablations are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from modules.config import FeatureTokensConfig, option
from modules.layers.moe.layer import RoutingConfig

MIXINGS = ("add", "revert", "boost", "attention", "none")
FEED_FORWARDS = ("swiglu", "gelu", "linear", "moe")
WITHOUT = ("residuals", "token_networks", "layer_networks", "means_in_queries", "request_in_queries")
SEQUENCES = ("mean", "target", "queries", "heads")
ONLY_OF = {"layer_networks": "heads", "means_in_queries": "queries", "request_in_queries": "queries"}
"""Ablation -> the `sequences` that have what it takes out."""


@dataclass
class SparseConfig(RoutingConfig):
    """Sparse experts of each token: alpha * sum over the top_k of num_experts, plus an expert that is always there."""

    num_experts: int = option(4, least=1)  # of each token, as wide together as its feed-forward network
    top_k: int = option(1, least=1)
    alpha: float = 2.0  # of the routed sum; published: the inverse of the share of experts that are active
    shared_expert: bool = True


@dataclass(kw_only=True)
class TokenMixingConfig(FeatureTokensConfig):
    name: str = "token_mixing"
    num_tokens: int = option(8, least=2)  # as many heads mix them
    user_tokens: int | None = option(None, least=1)  # of these, from features of the request; null: half
    one_way: bool = True  # user tokens receive nothing from item tokens and run once a request; false: all by candidate
    tokens: str = option("groups", choices=["groups", "split"])  # a group of features each | equal slices of all
    groups: list[list[str]] = option([])  # names of each group's features, user groups first; []: in order, evenly
    global_token: bool = False  # one token of each side is made of all its features
    mixing: str = option("boost", choices=MIXINGS)  # RankMixer's | TokenMixer-Large's | HyFormer's, MixFormer's | ...
    norm: str = option("pre", choices=["pre", "post"])
    feed_forward: str = option("swiglu", choices=FEED_FORWARDS)
    bias: bool = True  # of networks; false: on Hopper a SwiGLU network of each token is one operator
    output_std: float = 0.0  # of the networks' last weights at first; 0: as of any linear layer
    moe: SparseConfig = field(default_factory=SparseConfig)
    interval: int = 0  # blocks after which their input is added again, but not to the last one's output; 0: never
    lower_weight: float = 0.0  # loss of logits of each lower block, in that of the last one's; 0: none
    sequences: str = option(
        "mean", choices=SEQUENCES
    )  # features: means | DIN-like; in each layer: HyFormer | MixFormer
    merge_events: bool = False  # queries and heads: all event types in one sequence, by time; false: each its own
    encoding: str = option(
        "swiglu", choices=["swiglu", "attention", "newest", "none"]
    )  # queries: of events, each layer
    num_newest: int = option(16, least=1)  # encoding=newest: events that attend to all, and are all that goes on
    num_queries: int = option(1, least=1)  # of each side for each sequence
    head_dim: int = option(16, least=1)  # heads: width of a token's attention head

    # Published ablations, without: residuals | networks of each token: one set a side | with sequences=heads, a SwiGLU
    # of events in each layer: one for all | with sequences=queries, means of events in queries | and features of the
    # request (one_way=false).
    without: list[str] = option([], choices=WITHOUT)

    shared: ClassVar[frozenset[str]] = frozenset(
        {
            *("user_tokens", "one_way", "groups", "global_token", "interval"),
            *("lower_weight", "sequences", "merge_events", "num_queries", "without"),
        }
    )
    retired: ClassVar[dict[str, Any]] = {
        "per_token": True,
        "pool": "mean",
        "query_from": "all",
        "renew_features": False,
        "residual": True,
        "sequence_ffn": "own",
    }

    @property
    def of_user(self) -> int:
        """Tokens that features of the request make."""
        return self.num_tokens // 2 if self.user_tokens is None else self.user_tokens

    @property
    def query_from(self) -> str:
        if "request_in_queries" in self.without:
            return "candidate"
        return "features" if "means_in_queries" in self.without else "all"

    def check(self) -> None:
        super().check()
        heads, width = self.num_tokens, self.token_dim
        if width % heads:
            raise ValueError(
                f"model.token_dim={width} must be a multiple of model.num_tokens={heads}, as many heads mix them, "
                f"e.g. model.token_dim={heads * max(1, width // heads)}"
            )
        if self.of_user >= heads:
            raise ValueError(
                f"model.user_tokens={self.of_user} must be below model.num_tokens={heads}: items need a token, e.g. "
                f"model.user_tokens={heads // 2}"
            )
        if self.query_from == "candidate" and self.one_way:
            raise ValueError(
                "model.without=[request_in_queries] leaves queries of users nothing to be made of; use "
                "model.one_way=false"
            )
        for part in self.without:
            if (kind := ONLY_OF.get(part, self.sequences)) != self.sequences:
                raise ValueError(
                    f"model.without=[{part}] takes nothing out of model.sequences={self.sequences}; use "
                    f"model.sequences={kind}, or leave it out"
                )

    def check_layer(self) -> None:
        if self.token_dim % (2 * self.num_heads):
            pairs = 2 * self.num_heads
            raise ValueError(
                f"model.token_dim={self.token_dim} must be a multiple of 2 * model.num_heads={pairs}, e.g. "
                f"model.token_dim={pairs * max(1, self.token_dim // pairs)}"
            )
        if self.feed_forward == "moe" and self.sequences == "heads":
            raise ValueError(
                "model.feed_forward=moe: experts return rows as wide as they read, and with model.sequences=heads a "
                "network reads a token beside what its head attended to; use model.feed_forward=swiglu"
            )

    def graphs_refusal(self) -> str | None:
        if self.lower_weight:
            return (
                f"model.lower_weight={self.lower_weight}: a graph returns the last block's logits alone; use "
                "runtime.cuda_graphs=false or model.lower_weight=0"
            )
        return None

    def notes(self) -> list[str]:
        of_item = self.num_tokens - self.of_user
        if self.one_way:
            return [f"{self.of_user} tokens run at the rows of requests, {of_item} at those of candidates"]
        return [f"all {self.num_tokens} tokens run at the rows of candidates; model.one_way=true shares requests"]

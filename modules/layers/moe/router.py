"""Which experts a token goes to, with which weights, and how many tokens each expert got."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.moe import top_k
from modules.precision import FP32Linear

SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}


MOST_COMPARED = 64
"""Experts up to which selections are counted by comparison: atomics on few addresses wait for each other."""


class Routing(NamedTuple):
    """N tokens, k experts each, E experts."""

    selected_experts: Tensor  # [N, k] int64, distinct within a row
    weights: Tensor  # [N, k] mixing weights, fp32
    scores: Tensor  # [N, E] fp32
    counts: Tensor  # [E] int64, selections of each expert; sums to N * k


class Router(nn.Module):
    """Top-k token-choice router in fp32.

    Experts are selected by score + `expert_bias` and weighted by the score alone: the bias steers load and never
    enters the output (auxiliary-loss-free balancing, arXiv 2408.15664). It is a buffer, so checkpoints hold it and no
    optimiser or weight decay touches it. Selections made in training mode accumulate in `tokens_per_expert` until
    `update_router_biases`; that buffer is zero between optimiser steps and no part of the state dict.

    With `num_kinds`, tokens are of kinds 0, 1, ... in turn, and each kind chooses among experts of its own: those of
    kind t are t * E / num_kinds to (t + 1) * E / num_kinds. Scores of all others are 0. Where only tokens of an equal
    `part` (its number, of how many) of the kinds come, the routing is among the experts of these.
    """

    expert_bias: Tensor
    tokens_per_expert: Tensor
    part = (0, 1)

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize_weights: bool = True,
        bias_update_rate: float = 1e-3,
        num_kinds: int = 1,
    ) -> None:
        super().__init__()
        if num_experts % num_kinds:
            raise ValueError(f"{num_experts} experts cannot be shared out evenly among {num_kinds} kinds of tokens")
        if not 1 <= top_k <= num_experts // num_kinds:
            raise ValueError(f"moe.top_k must be in 1..num_experts={num_experts // num_kinds}, got {top_k}")
        if score not in SCORES:
            raise ValueError(f"moe.score must be one of {sorted(SCORES)}, got {score!r}")
        if top_k == 1 and num_experts > num_kinds and normalize_weights:
            raise ValueError(
                "moe.top_k=1 with normalize_weights=true makes every mixing weight 1, so the router gets no gradient; "
                "set moe.normalize_weights=false or moe.top_k=2"
            )
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.normalize_weights = normalize_weights
        self.bias_update_rate = bias_update_rate
        self.num_kinds = num_kinds
        self.gate = FP32Linear(dim, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        # On the CPU even if the default device is meta: no checkpoint would fill them in.
        counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu" if self.expert_bias.is_meta else None)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def reset_parameters(self) -> None:
        """Fill the buffers again, after `to_empty`."""
        self.expert_bias.zero_()
        self.tokens_per_expert.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """The bias stays float32: in half precision its small steps would be rounded away once it has grown."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype in (torch.float16, torch.bfloat16):
            self.expert_bias = bias.to(self.expert_bias.device, torch.promote_types(bias.dtype, torch.float32))
        return self

    def forward(self, x: Tensor) -> Routing:
        """x [N, dim] of any float dtype."""
        scores = SCORES[self.score](self._admissible(self._own(self.gate(x), 1)))
        selected_experts = top_k(self._admissible(scores.detach() + self._own(self.expert_bias)), self.top_k)
        weights = scores.gather(1, selected_experts)
        if self.normalize_weights:
            # All selected scores can be 0 by underflow, since the bias decides the selection.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        counts = self._counts(selected_experts.flatten(), scores.shape[1])
        if self.training:
            self._own(self.tokens_per_expert).add_(counts)
        return Routing(selected_experts, weights, scores, counts)

    def _own(self, x: Tensor, dim: int = 0) -> Tensor:
        """Of [.., E, ..] that of the part."""
        index, count = self.part
        return x if count == 1 else x.chunk(count, dim)[index]

    def _admissible(self, scores: Tensor) -> Tensor:
        """scores [N, E] with -inf at experts of other kinds than that of the token."""
        if self.num_kinds == 1:
            return scores
        count = self.num_kinds // self.part[1]
        kinds = torch.arange(count, device=scores.device)
        others = kinds[:, None] != kinds.repeat_interleave(self.num_experts // self.num_kinds)
        by_kind = scores.unflatten(0, (scores.shape[0] // count, count))
        return by_kind.masked_fill(others, -torch.inf).flatten(0, 1)

    def _counts(self, selections: Tensor, num_experts: int) -> Tensor:
        """[E] int64: how often each expert is among `selections`; bincount would sync with the host."""
        if num_experts <= MOST_COMPARED:
            return (selections[:, None] == torch.arange(num_experts, device=selections.device)).sum(0)
        # Integer atomics commute, so this scatter is deterministic.
        return selections.new_zeros(num_experts).scatter_add_(0, selections, torch.ones_like(selections))

    @torch.no_grad()
    def update_bias(self, counts: Tensor) -> None:
        """One step of loss-free balancing on the globally reduced counts [E] of the optimiser step.

        bias += delta - mean(delta) with delta = rate * sign(mean(counts) - counts); subtracting the mean keeps the bias
        from drifting as a whole. The sign is that of an integer, so a balanced expert gets exactly 0.
        """
        delta = self.bias_update_rate * (counts.sum() - self.num_experts * counts).sign().to(self.expert_bias.dtype)
        self.expert_bias += delta - delta.mean()

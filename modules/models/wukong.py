"""Wukong (arXiv 2403.02545) as a model: a stack of its layers over all tokens, then the heads. docs/wukong.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from kernels.jagged import segment_mean
from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows
from modules.embedding import Tokens
from modules.mlp import TaskHeads
from modules.norms import rms_norm
from modules.wukong import WukongLayer


@dataclass
class WukongConfig:
    dim: int = 32  # width of every token
    dropout: float = 0.0
    num_layers: int = 3  # each squares the order of interactions
    num_fmb: int = 8  # tokens that a layer's factorisation machine makes
    num_lcb: int = 8  # tokens that its linear compression makes
    machine: str = "optimised"  # optimised: X (X^T Y) | plain: X X^T | attentive: optimised, with a Y of each candidate
    rank: int = 8  # columns of Y
    hidden: list[int] = field(default_factory=lambda: [128])  # of the machine's MLP
    num_compressed: int = 4  # attentive: mixtures of tokens that Y is made from
    attention_hidden: list[int] = field(default_factory=lambda: [64])  # attentive: of the MLP that makes Y
    head_hidden: list[int] = field(default_factory=lambda: [128, 64])


class Wukong(nn.Module):
    """Logits [C, tasks] from tokens; arguments are the fields of `WukongConfig`.

    It does not model sequences: each history field is one more request token, the mean of its events. The first layer
    takes the request's tokens at the request's rows, see `WukongLayer`.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        dim: int,
        *,
        dropout: float,
        num_layers: int,
        num_fmb: int,
        num_lcb: int,
        machine: str,
        rank: int,
        hidden: Sequence[int],
        num_compressed: int,
        attention_hidden: Sequence[int],
        head_hidden: Sequence[int],
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1, got {num_layers}")
        num_request = spec.num_request_tokens + sum(len(event.fields) for event in spec.histories)
        made = num_fmb + num_lcb

        def layer(num_candidate: int, num_request: int = 0) -> WukongLayer:
            return WukongLayer(
                num_candidate,
                dim,
                num_fmb=num_fmb,
                num_lcb=num_lcb,
                rank=rank,
                hidden=hidden,
                dropout=dropout,
                num_request=num_request,
                max_candidates=spec.max_candidates,
                machine=machine,
                num_compressed=num_compressed,
                attention_hidden=attention_hidden,
            )

        layers = nn.ModuleList([layer(spec.num_candidate_tokens, num_request)])
        layers.extend(layer(made) for _ in range(num_layers - 1))
        self.layers = cast("Sequence[WukongLayer]", layers)
        self.heads = TaskHeads(made * dim, head_hidden, len(spec.tasks), dropout)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        dim = tokens.request.shape[2]
        means = [segment_mean(history.values, history.offsets) for history in tokens.histories.values()]
        request = torch.cat([tokens.request, *(mean.unflatten(1, (-1, dim)) for mean in means)], dim=1)
        first, *rest = self.layers
        x = first(rms_norm(tokens.candidate), rms_norm(request), CandidateRows.of(batch))
        for layer in rest:
            x = layer(x)
        return self.heads(x.flatten(1))

    def aux_loss(self) -> Tensor:
        return next(self.parameters()).new_zeros(())

    def flops_per_batch(
        self, num_requests: float, num_candidates: float, sum_lengths: float, sum_squared_lengths: float
    ) -> float:
        """Forward FLOPs of the matrix products; histories are only averaged."""
        flops = sum(layer.flops(num_candidates, num_requests) for layer in self.layers)
        return flops + self.heads.flops(num_candidates, num_requests)

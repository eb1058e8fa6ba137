"""Wukong (arXiv 2403.02545) as a model: a stack of its layers over all tokens, then the heads. docs/wukong.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from kernels.jagged import segment_mean
from modules.batch import FeatureSpec, RequestBatch
from modules.broadcast import CandidateRows, above_candidates
from modules.config import RankingConfig, option
from modules.layers.embedding.tokens import Tokens
from modules.layers.feed_forward.block import FeedForwardBlock, FeedForwardConfig
from modules.layers.feed_forward.mlp import TaskHeads
from modules.layers.interaction.wukong import WukongConfig, WukongLayer
from modules.layers.norms import rms_norm
from modules.models.ranking import Ranker


class Wukong(Ranker):
    """Logits [C, tasks] from tokens.

    It does not model sequences: each history field is one more request token, the mean of its events. The first layer
    takes the request's tokens at the request's rows, or all tokens above a candidate at those of vendors, see
    `WukongLayer`. `feed_forward` is a block after each layer.
    """

    takes_vendors = True

    @dataclass(kw_only=True)
    class Config(FeedForwardConfig, RankingConfig):
        name: str = "wukong"
        wukong: WukongConfig = field(default_factory=WukongConfig)
        hidden: list[int] = option([128], least=1)  # of the machine's MLP

        retired: ClassVar[dict[str, Any]] = WukongConfig.retired
        moved: ClassVar[dict[str, str]] = WukongConfig.beside
        usual_layers: ClassVar[int] = 3  # each squares the order of interactions

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__()
        num_request = spec.num_request_tokens + sum(len(event.fields) for event in spec.histories)
        num_request += spec.num_vendor_tokens
        layers: list[WukongLayer] = []
        for own in config.of_layers():
            layers.append(
                WukongLayer(
                    layers[-1].num_out if layers else spec.num_candidate_tokens,
                    config.dim,
                    hidden=own.hidden,
                    dropout=own.dropout,
                    num_request=0 if layers else num_request,
                    max_candidates=spec.max_candidates,
                    block=FeedForwardBlock(own, config.dim),
                    **own.wukong.layer_options(),
                )
            )
        self.layers = cast("Sequence[WukongLayer]", nn.ModuleList(layers))
        self.heads = TaskHeads(layers[-1].num_out * config.dim, config.head_hidden, spec.num_outputs, config.dropout)

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """Logits [C, tasks]."""
        dim = tokens.request.shape[2]
        means = [segment_mean(history.values, history.offsets) for history in tokens.histories.values()]
        request = torch.cat([tokens.request, *(mean.unflatten(1, (-1, dim)) for mean in means)], dim=1)
        if self.only_vectors():
            return rms_norm(request).flatten(1)
        first, *rest = self.layers
        above, rows = above_candidates(request, tokens.vendor, batch, CandidateRows.of(batch))
        x = first(rms_norm(tokens.candidate), rms_norm(above), rows)
        for layer in rest:
            x = layer(x)
        return self.heads(x.flatten(1))

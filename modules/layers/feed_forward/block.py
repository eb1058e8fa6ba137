"""The feed-forward layers that large models have by the same keys: none, a dense one, or routed experts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from modules.config import ModelConfig, option
from modules.layers.feed_forward.mlp import MLP
from modules.layers.moe import MoE
from modules.layers.norms import rms_norm


@dataclass(kw_only=True)
class FeedForwardConfig(ModelConfig):
    """Before `StackConfig` among the bases of a model's `Config`, so that layers may differ."""

    feed_forward: str = option("none", choices=["none", "dense", "moe"])  # in each layer; moe: routed experts
    feed_forward_dim: int = 128  # dense: hidden width
    moe: MoE.Config = field(default_factory=MoE.Config)

    def make_feed_forward(self, dim: int) -> nn.Module | None:
        """[..., dim] -> [..., dim], or None."""
        if self.feed_forward == "moe":
            return MoE(dim, **vars(self.moe))
        return MLP(dim, [self.feed_forward_dim], dim) if self.feed_forward == "dense" else None

    def graphs_refusal(self) -> str | None:
        for layer in self.of_layers():
            if layer.feed_forward == "moe" and layer.moe.aux_loss_weight:
                return (
                    f"model.moe.aux_loss_weight={layer.moe.aux_loss_weight} gives that no gradient; use "
                    "runtime.cuda_graphs=false, or balance by model.moe.bias_update_rate with aux_loss_weight=0"
                )
        return super().graphs_refusal()


class FeedForwardBlock(nn.Module):
    """Norm(X + FF(X)) of normalised tokens X [..., dim]; X itself where `config` has no feed-forward layer."""

    def __init__(self, config: FeedForwardConfig, dim: int) -> None:
        super().__init__()
        self.feed_forward = config.make_feed_forward(dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.feed_forward is None:
            return tokens
        return rms_norm(tokens + self.dropout(self.feed_forward(tokens)))

"""SASRec: causal self-attention over a user's items (Kang and McAuley, arXiv 1808.09781)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from modules.batch import FeatureSpec
from modules.config import option
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.feed_forward.mlp import MLP
from modules.layers.norms import rms_norm
from modules.models.sequential import Sequences, SequentialConfig, SequentialModel


class SASRecLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), on jagged rows; each branch is dropped out."""

    def __init__(self, dim: int, num_heads: int, hidden: int, *, max_length: int, dropout: float) -> None:
        super().__init__()
        self.attention = JaggedSelfAttention(dim, num_heads, max_length=max_length, causal=True)
        self.feed_forward = MLP(dim, [hidden], dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """[N, dim] -> [N, dim]."""
        x = x + self.dropout(self.attention(rms_norm(x), offsets))
        return x + self.dropout(self.feed_forward(rms_norm(x)))


class SASRec(SequentialModel):
    """Norms are without learned scales and come first in each branch, activations are SiLU, attention weights are not
    dropped out; else the published model, with the losses, scores and negatives that one asks for."""

    @dataclass(kw_only=True)
    class Config(SequentialConfig):
        name: str = "sasrec"
        feed_forward_dim: int = option(256, least=1)

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__(spec, config)
        layers = (
            SASRecLayer(
                config.dim,
                own.num_heads,
                own.feed_forward_dim,
                max_length=self.max_length,
                dropout=own.dropout,
            )
            for own in config.of_layers()
        )
        self.layers = nn.ModuleList(layers)

    def encode(self, values: Tensor, sequences: Sequences) -> Tensor:
        for layer in self.layers:
            values = layer(values, sequences.offsets)
        return rms_norm(values)

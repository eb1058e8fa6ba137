"""HSTU: sequences through pointwise attention that a gate multiplies (Zhai et al., arXiv 2402.17152)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernels.core.constants import EPSILON
from kernels.gdpa import gdpa, layer_norm
from modules.batch import FeatureSpec
from modules.config import HeadsConfig, StackConfig, option
from modules.core.checks import check_maximum
from modules.layers.attention.jagged_attention import head_dim
from modules.models.sequential import Sequences, SequentialConfig, SequentialModel


class HSTULayer(nn.Module):
    """x + W_2 (LN(A V) * U) with U, V, Q, K = split(SiLU(W_1 LN(x))) and A = SiLU(scale Q K^T + bias) / length.

    A is causal. It is GDPA with SiLU. The bias is a learned number for each head and distance, and one for each
    logarithmic bucket of the seconds from a key's event to what the query predicts (`time_buckets`, 0: none). Published
    code differs in constants, which weights cannot make up for:

    - `scale`: 1 / sqrt(d) unless given, as in generative-recommenders' production layer; its research layer has 1.
    - `epsilon` of both norms, 1e-6 in either. It counts in the second: what is divided by a length of 200 or more has a
      variance below it where few events are seen, and rows of few events are scaled down.
    - `divide_by`: "max_length" is the constant of that name, as published, "length" the number of a row's tokens up to
      each, by which those of few events are not scaled down. Neither depends on later events or on other rows.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_length: int,
        dropout: float,
        position_bias: bool = True,
        time_buckets: int = 0,
        scale: float | None = None,
        epsilon: float = EPSILON,
        divide_by: str = "max_length",
        contextual: int = 0,
        window: int | None = None,
        prefix: int = 0,
        max_targets: int = 0,
    ) -> None:
        """No row has more than `max_length` tokens besides up to `max_targets` targets; for the masks see `gdpa`."""
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim(dim, num_heads)
        self.max_length = max_length
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.masks: dict[str, Any] = {"contextual": contextual, "prefix": prefix, "window": (window, 0)}
        self.max_targets = max_targets
        self.epsilon, self.by_row = epsilon, divide_by == "length"
        self.project = nn.Linear(dim, 4 * dim)
        self.output = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.position_bias = nn.Parameter(torch.zeros(num_heads, 2 * max_length - 1)) if position_bias else None
        self.time_bias = nn.Parameter(torch.zeros(num_heads, time_buckets)) if time_buckets else None

    def forward(
        self, x: Tensor, offsets: Tensor, times: Tensor, next_times: Tensor, num_targets: Tensor | None = None
    ) -> Tensor:
        """[N, dim] of rows `offsets` [R + 1]; times [N] int64, of events and of what each predicts -> [N, dim].

        The last `num_targets` [R] tokens of each row are targets.
        """
        longest = self.max_length + self.max_targets
        check_maximum(offsets, longest, "max_length")
        projected = nn.functional.silu(self.project(self.norm(x)))
        gate, *parts = projected.chunk(4, dim=1)
        value, query, key = (part.unflatten(1, (self.num_heads, self.head_dim)) for part in parts)
        dated = self.time_bias is not None
        attended = gdpa(
            query,
            key,
            value,
            offsets,
            offsets,
            max_q=longest,
            max_k=longest,
            activation="silu",
            score_scale=self.scale,
            out_scale=1.0 if self.by_row else 1 / self.max_length,
            num_targets=num_targets,
            **self.masks,
            position_bias=self.position_bias,
            time_bias=self.time_bias,
            q_times=next_times if dated else None,
            k_times=times if dated else None,
        )
        attended = attended.flatten(1)
        if self.by_row:
            attended = attended / self._shown(offsets, num_targets, x.shape[0])[:, None]
        return x + self.output(self.dropout(self.norm(attended.to(gate.dtype)) * gate))

    def _shown(self, offsets: Tensor, num_targets: Tensor | None, total: int) -> Tensor:
        """[N]: how many tokens each is shown, whatever the window: its own place and those before, never later ones."""
        lengths = offsets.diff()
        history = lengths if num_targets is None else lengths - num_targets
        starts, history = (torch.repeat_interleave(x, lengths, output_size=total) for x in (offsets[:-1], history))
        place = torch.arange(total, device=offsets.device) - starts
        shown = torch.minimum(place, history) + 1  # targets do not see each other
        return torch.where((place < self.masks["contextual"]) & (place < history), history, shown)

    def norm(self, x: Tensor) -> Tensor:
        if self.epsilon == EPSILON:
            return layer_norm(x)
        return nn.functional.layer_norm(x, x.shape[-1:], eps=self.epsilon).to(x.dtype)


@dataclass(kw_only=True)
class HSTULayerConfig(HeadsConfig, StackConfig):
    """What models of `HSTULayer`s share."""

    num_heads: int = option(1, least=1)
    position_bias: bool = True  # a learned number for each head and distance is added to scores
    time_buckets: int = 0  # the same for so many log buckets of the seconds from an event to the one to predict
    scale: float | None = None  # of scores before their biases; null: 1 / sqrt(width of a head)
    epsilon: float = EPSILON  # of the norms; 1e-6 as published
    # Weights of events are divided by the most that a row has (as published), or by how many there are up to a token.
    divide_by: str = option("max_length", choices=["max_length", "length"])

    def check_layer(self) -> None:
        super().check_layer()
        if not self.epsilon > 0:
            raise ValueError(f"model.epsilon={self.epsilon} must be above 0, e.g. model.epsilon=1e-6")

    def layer(self, dim: int, **options: Any) -> HSTULayer:
        keys = ("dropout", "position_bias", "time_buckets", "scale", "epsilon", "divide_by")
        return HSTULayer(dim, self.num_heads, **{key: getattr(self, key) for key in keys}, **options)


class HSTU(SequentialModel):
    """Layers of `HSTULayer` over items and their positions; by default scored by the cosine, as published."""

    @dataclass(kw_only=True)
    class Config(SequentialConfig, HSTULayerConfig):
        name: str = "hstu"
        score: str = option("cosine", choices=["dot", "cosine"])
        temperature: float = 0.05

    def __init__(self, spec: FeatureSpec, config: Config) -> None:
        super().__init__(spec, config)
        layers = (own.layer(config.dim, max_length=self.max_length) for own in config.of_layers())
        self.layers = nn.ModuleList(layers)

    def encode(self, values: Tensor, sequences: Sequences) -> Tensor:
        for layer in self.layers:
            values = layer(values, sequences.offsets, sequences.times, sequences.next_times)
        return values

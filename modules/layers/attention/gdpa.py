"""GDPA: attention with an activation in place of the softmax, as self-attention, pooling and feed-forward network.

    out_i = sum_j act_h(q_i . k_j / tau) v_j          per head, act_h the activation of head h

is the form of Kunlun (arXiv 2602.10016), where tau is the maximal sequence length: a constant of the configuration,
here the largest number of keys a row may have. With normalised queries and keys scores would then be so small that any
smooth activation is a straight line; there the norm bounds scores and tau divides the sum instead:

    out_i = sum_j act_h(q_i . k_j / sqrt(head_dim)) v_j / tau

`kernels.gdpa` computes both; nothing is padded and no score is kept in memory.

The modules differ in their queries (`queries()`, unless the call gives others) and in where keys and values come from.
`GDPABlock` puts the norms and residuals of a production block around any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.core import dispatch
from kernels.gdpa import ACTIVATIONS, add_norms, gdpa, layer_norm
from modules.config import option
from modules.core.checks import check_maximum, check_tokens
from modules.layers.attention.jagged_attention import head_dim
from modules.layers.attention.rotary import Rotation, rotate
from modules.layers.norms import rms_norm

Activation = str | Sequence[str]


@dataclass
class GDPAConfig:
    """Options of every module here, as a configuration has them."""

    activation: Any = option("gelu", choices=ACTIVATIONS)  # of scores: a name, or a list with one for each head
    qk_norm: bool = True  # normalise each head of queries and keys
    score_scale: float | None = None  # factor before the activation; null: head_dim^-0.5 with qk_norm, else 1 / keys
    out_scale: float | None = None  # factor after it; null: 1 / keys with qk_norm, else 1


def scales(
    keys: int, head_dim: int, qk_norm: bool, score_scale: float | None, out_scale: float | None
) -> tuple[float, float]:
    """(before, after the activation) for rows of at most `keys` keys: what is given, else as `GDPAConfig` says."""
    before, after = (head_dim**-0.5, 1 / keys) if qk_norm else (1 / keys, 1.0)
    return before if score_scale is None else score_scale, after if out_scale is None else out_scale


class GDPASelfAttention(nn.Module):
    """Every token of a row attends to its row: (values [N, dim], offsets [B + 1]) -> [N, dim].

    With `rotation`, (cos, sin) from `rotary.rotation`, queries and keys are rotated by their positions.
    `activation` is a name of `kernels.gdpa.ACTIVATIONS`, or one per head. `window` limits a token to neighbours
    |i - j| <= window, `causal` to itself and those before it. `qk_norm` normalises each head of queries and keys (RMS,
    without learned scale). `score_scale` and `out_scale` act before and after the activation; unless given they are
    those of `scales` for max_length keys, a constant that no row exceeds.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_length: int,
        activation: Activation = "gelu",
        window: int | None = None,
        causal: bool = False,
        qk_norm: bool = False,
        score_scale: float | None = None,
        out_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.max_length = max_length
        self.activation = activation
        reach = -1 if window is None else window
        self.window = (reach, 0 if causal else reach)
        self.qk_norm = qk_norm
        self.score_scale, self.out_scale = scales(max_length, self.head_dim, qk_norm, score_scale, out_scale)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def queries(self, values: Tensor, offsets: Tensor, rotation: Rotation | None = None) -> Tensor:
        check_tokens(values, self.query_key_value.in_features, self.query_key_value)
        return values

    def forward(
        self,
        values: Tensor,
        offsets: Tensor,
        rotation: Rotation | None = None,
        *,
        queries: Tensor | None = None,
    ) -> Tensor:
        """`queries` [N, dim] replace `values`, also as the source of keys and values."""
        queries = self.queries(values, offsets) if queries is None else queries
        check_maximum(offsets, self.max_length, "max_length")
        projected = self.query_key_value(queries)
        query, key, value = projected.view(-1, 3, self.num_heads, self.head_dim).unbind(1)
        query, key = _normalised(self.qk_norm, query, key)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        attended = gdpa(
            query,
            key,
            value,
            offsets,
            offsets,
            max_q=self.max_length,
            max_k=self.max_length,
            activation=self.activation,
            score_scale=self.score_scale,
            out_scale=self.out_scale,
            window=self.window,
        )
        return self.output(attended.flatten(1))


class GDPAPooling(nn.Module):
    """Learned seeds attend to a row: (values [N, dim], offsets [B + 1]) -> its summary [B, num_seeds, dim].

    PMA (Set Transformer, arXiv 1810.00825) with an activation in place of the softmax, and, as in InterFormer, without
    PMA's residual, feed-forward and norms. The seeds are projected once and read by every row; the summary of an empty
    row is zeros. Options as in `GDPASelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_seeds: int,
        *,
        max_length: int,
        activation: Activation = "gelu",
        qk_norm: bool = False,
        score_scale: float | None = None,
        out_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.max_length = max_length
        self.activation = activation
        self.qk_norm = qk_norm
        self.score_scale, self.out_scale = scales(max_length, self.head_dim, qk_norm, score_scale, out_scale)
        self.seeds = nn.Parameter(torch.empty(num_seeds, dim))
        self.reset_parameters()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.seeds)

    def queries(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.seeds

    def forward(self, values: Tensor, offsets: Tensor, *, queries: Tensor | None = None) -> Tensor:
        """`queries` [num_seeds, dim] replace the seeds."""
        check_tokens(values, self.key_value.in_features, self.key_value)
        check_maximum(offsets, self.max_length, "max_length")
        queries = self.seeds if queries is None else queries
        query = self.query(queries).view(-1, self.num_heads, self.head_dim)
        key, value = self.key_value(values).view(-1, 2, self.num_heads, self.head_dim).unbind(1)
        attended = gdpa(
            *_normalised(self.qk_norm, query, key),
            value,
            None,
            offsets,
            max_q=len(query),
            max_k=self.max_length,
            activation=self.activation,
            score_scale=self.score_scale,
            out_scale=self.out_scale,
        )
        return self.output(attended.view(-1, *queries.shape))


class PersonalizedFFN(nn.Module):
    """A feed-forward network whose weights each row gets from its own summary (PFFN).

    (values [N, dim], offsets [B + 1], summary [B, num_summary, dim]) -> [N, dim]. For each head of a token s,

        act(s W_1) W_2,     W_1^T = M_1 X,  W_2 = M_2 X,     X [num_summary, dim] the summary of its row

    which is attention with the token itself as the query and `hidden` keys and values: M_1 and M_2, each
    [hidden, num_summary], mix the tokens of the summary, the same for every feature. Made so, the weights of a row have
    at most rank num_summary. Heads of the token do not mix; that is left to the attention that follows.
    Scales are those of `scales` for `hidden` keys; the other options are those of `GDPASelfAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_summary: int,
        hidden: int,
        *,
        max_length: int,
        activation: Activation = "gelu",
        qk_norm: bool = False,
        score_scale: float | None = None,
        out_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.max_length = max_length
        self.activation = activation
        self.qk_norm = qk_norm
        self.score_scale, self.out_scale = scales(hidden, self.head_dim, qk_norm, score_scale, out_scale)
        self.num_summary = num_summary
        # Rows of M_1 and M_2 alternate, so that keys and values are views of one product without gaps between rows.
        self.mix = nn.Parameter(torch.empty(2 * hidden, num_summary))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.mix.shape[1] ** -0.5
        nn.init.uniform_(self.mix, -bound, bound)

    def queries(self, values: Tensor, offsets: Tensor, summary: Tensor) -> Tensor:
        check_tokens(values, self.num_heads * self.head_dim)
        return values

    @property
    def normed_heads(self) -> int:
        """In how many heads queries are normalised before anything else, so that a norm before may do it as well."""
        return self.num_heads if self.qk_norm else 0

    def forward(
        self,
        values: Tensor,
        offsets: Tensor,
        summary: Tensor,
        *,
        queries: Tensor | None = None,
        heads_normed: bool = False,
    ) -> Tensor:
        """`queries` [N, dim] replace `values` as queries, `heads_normed` if their heads are normalised already."""
        queries = self.queries(values, offsets, summary) if queries is None else queries
        check_maximum(offsets, self.max_length, "max_length")
        if summary.shape[1:] != (self.num_summary, self.num_heads * self.head_dim):
            raise ValueError(
                f"summary must be [B, {self.num_summary}, {self.num_heads * self.head_dim}], got {list(summary.shape)}"
            )
        # A batched product: matmul would transpose the summary, to make one large product with features as rows.
        # Autocast would round what is expanded, a copy for each row, and its gradient before the sum over rows.
        mix, summary = dispatch.autocast_operands(mix=self.mix, summary=summary)
        mixed = torch.bmm(mix.expand(len(summary), -1, -1), summary)
        key, value = mixed.view(len(summary), len(self.mix) // 2, 2, self.num_heads, self.head_dim).unbind(2)
        query = queries.view(-1, self.num_heads, self.head_dim)
        attended = gdpa(
            query if heads_normed or not self.qk_norm else rms_norm(query),
            rms_norm(key) if self.qk_norm else key,
            value,
            offsets,
            None,
            max_q=self.max_length,
            max_k=key.shape[1],
            activation=self.activation,
            score_scale=self.score_scale,
            out_scale=self.out_scale,
        )
        return attended.flatten(1)


class Attention(Protocol):
    """A module that `GDPABlock` can be put around."""

    def queries(self, *inputs: Any, **named: Any) -> Tensor: ...

    def __call__(self, *inputs: Any, queries: Tensor, **named: Any) -> Tensor: ...


class GDPABlock(nn.Module):
    """q + RMSNorm(attention(LN(q)) + LN(q)), the block that Meta describes around its production PFFN (2026-07-10 blog
    on fusing norms with GDPA): the inner residual is the normalised query, the outer one the query itself.

    Takes the inputs of `attention`, one of the modules above, and gives an output of the same shape. Both norms span
    all heads and have no learned parameters. With `norm` it gives a triple of its output, the RMSNorm of that and the
    same again, for two readers.
    """

    def __init__(self, attention: Attention, *, norm: bool = False) -> None:
        super().__init__()
        self.attention = attention
        self.norm = norm

    def forward(self, *inputs: Any, **named: Any) -> Any:
        queries = self.attention.queries(*inputs, **named)
        heads = getattr(self.attention, "normed_heads", 0)
        normed, queries = layer_norm(queries, heads=heads, beside=True)
        if heads:
            named["heads_normed"] = True
        attended = self.attention(*inputs, **named, queries=normed).to(queries.dtype)
        queries = queries.expand_as(attended)
        return add_norms(attended, queries, norm=True) if self.norm else add_norms(attended, queries)


def _normalised(wanted: bool, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return (rms_norm(query), rms_norm(key)) if wanted else (query, key)

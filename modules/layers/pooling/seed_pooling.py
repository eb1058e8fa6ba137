"""Hierarchical seed pooling (HSP) of Kunlun (arXiv 2602.10016): a sequence summarised in two steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.core.offsets import scaled_offsets
from kernels.ikbo import target_attention
from kernels.tokens import unbind
from modules.core.checks import check_maximum, check_tokens
from modules.layers.attention.absorbed import AbsorbingAttention
from modules.layers.attention.jagged_attention import head_dim
from modules.layers.interaction.sum_kron import SumKronLinear
from modules.layers.norms import rms_norm


class SeedPooling(AbsorbingAttention):
    """(values [N, dim], offsets [B + 1]) -> a summary [B, num_tokens, out_dim] of each row.

        H_seed    = MHA(Norm(E_seed), S, S)          E_seed [num_seeds, dim] learned, more seeds than tokens
        H_summary = SumKronLinear(H_seed)            num_seeds -> num_tokens

    The seeds are the same for every row and projected once. Where they are few, the rows are not projected: see
    `AbsorbingAttention`. MHA has no output projection of its own: the matrices of
    SumKronLinear follow at once. With `terms` of 0 there is no second step but a projection to out_dim, and seeds are
    the tokens, as in pooling by multi-head attention (PMA). Values must be normalised; the summary of an empty row is
    zeros. `max_length` is a constant that no row exceeds; `out_dim` is `dim` unless given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_seeds: int,
        num_tokens: int,
        terms: int,
        max_length: int,
        out_dim: int | None = None,
    ) -> None:
        super().__init__()
        if terms == 0 and num_seeds != num_tokens:
            raise ValueError(
                f"without terms of SumKronLinear the seeds are the tokens: num_seeds={num_seeds} must be "
                f"num_tokens={num_tokens}, or terms at least 1, e.g. terms=4"
            )
        self.head_dim = head_dim(dim, num_heads)
        self.num_heads = num_heads
        self.max_length = max_length
        self.max_queries = num_seeds
        self.seeds = nn.Parameter(torch.empty(num_seeds, dim))
        self.reset_parameters()
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.compress: SumKronLinear | nn.Linear
        if terms:
            self.compress = SumKronLinear(num_seeds, num_tokens, dim, terms=terms, out_dim=out_dim)
        else:
            self.compress = nn.Linear(dim, dim if out_dim is None else out_dim, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.seeds)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        check_tokens(values, self.key_value.in_features, self.key_value)
        check_maximum(offsets, self.max_length, "max_length")
        num_rows, num_seeds = offsets.shape[0] - 1, self.seeds.shape[0]
        query = self.query(rms_norm(self.seeds)).view(num_seeds, self.num_heads, self.head_dim)
        rows = torch.arange(num_rows + 1, device=offsets.device)
        if self.absorbs(values):
            queries = self.absorbed_query(query).expand(num_rows, -1, -1, -1).flatten(0, 1)
            pooled = self.absorbed_attention(queries, values, scaled_offsets(rows, num_seeds), offsets)
            return self.compress(pooled.reshape(num_rows, num_seeds, -1))
        key, value = unbind(self.key_value(values).view(-1, 2, self.num_heads, self.head_dim))
        pooled = target_attention(
            query.expand(num_rows, -1, -1, -1),
            key,
            value,
            rows,
            offsets,
            max_candidates=1,
            max_k=self.max_length,
        )
        return self.compress(pooled.flatten(2))

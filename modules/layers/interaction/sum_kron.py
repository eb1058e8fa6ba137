"""SumKronLinear of Kunlun (arXiv 2602.10016): a linear map of tokens as a sum of Kronecker products."""

from __future__ import annotations

from torch import Tensor, nn

from modules.layers.interaction.lce import LCE


class SumKronLinear(nn.Module):
    """Y = sum_i Z_i^T X W_i over `terms` pairs of matrices: [B, num_in, dim] -> [B, num_out, out_dim].

    Z_i [num_in, num_out] mixes tokens and W_i [dim, out_dim] features, without bias; with one term this is linear
    compression and a projection. The tokens are mixed first, which is the cheaper order where num_out < num_in: all
    Z_i are one linear compression to num_out * terms tokens, and the W_i with the sum over i are one matrix product.
    `out_dim` is `dim` unless given.
    """

    def __init__(self, num_in: int, num_out: int, dim: int, *, terms: int, out_dim: int | None = None) -> None:
        super().__init__()
        for name, count in (("num_in", num_in), ("num_out", num_out), ("terms", terms)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        # Row t * terms + i of the compression is column t of Z_i, so that the terms of a token lie side by side.
        self.mix = LCE(num_in, num_out * terms)
        self.project = nn.Linear(terms * dim, dim if out_dim is None else out_dim, bias=False)
        self.num_out = num_out
        self.terms = terms
        self.dim = dim

    def forward(self, tokens: Tensor) -> Tensor:
        return self.project(self.mix(tokens).reshape(tokens.shape[0], self.num_out, self.terms * self.dim))

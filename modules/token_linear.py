"""Layers in which each of T tokens has weights of its own: products of T groups that have the same number of rows.

No row is routed and no size is read from the device, so a step with these layers can be a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.moe import swiglu
from kernels.mxfp8 import (
    QUANTIZED,
    grouped_execution,
    grouped_mm,
    linear,
    linear_execution,
    multiplies_grouped_codes,
    multiplies_linear_codes,
)
from kernels.tokens import EPSILON
from modules.broadcast import CandidateRows
from modules.norms import rms_norm
from modules.precision import Quantizable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "gelu": F.gelu}
"""swiglu halves the width: silu(first half) * second half."""


class TokenLinear(Quantizable):
    """y_t = W_t x_t + b_t for the tokens t of each row: [N, T, in_dim] -> [N, T, out_dim].

    `weight` [T, out_dim, in_dim] starts like nn.Linear's with `fan_in` inputs (None: in_dim), or with standard
    deviation `std`. With `per_token=False` one [1, out_dim, in_dim] serves all tokens, of any number.
    """

    def __init__(
        self,
        num_tokens: int,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = True,
        per_token: bool = True,
        fan_in: int | None = None,
        std: float = 0.0,
    ) -> None:
        super().__init__()
        self.fan_in, self.std = fan_in or in_dim, std
        sets = num_tokens if per_token else 1
        self.weight = nn.Parameter(torch.empty(sets, out_dim, in_dim))
        # One dimension: precisions look at the last two of others.
        self.bias = nn.Parameter(torch.empty(sets * out_dim)) if bias else None
        self.per_token = per_token
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.fan_in)
        if self.std:
            nn.init.normal_(self.weight, std=self.std)
        else:
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias) if self.std else nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        if not self.per_token:
            weight = self.weight[0]
            return F.linear(x, weight, self.bias) if self.recipe == "none" else self._quantised(x, weight)
        bias = None if self.bias is None else self.bias.view(self.weight.shape[0], 1, -1)
        if self.recipe == "none":
            groups, weight = x.transpose(0, 1), self.weight.mT
            y = torch.bmm(groups, weight) if bias is None else torch.baddbmm(bias, groups, weight)
            return y.transpose(0, 1)
        count, tokens = x.shape[:2]
        ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=x.device) * count
        y = grouped_mm(x.transpose(0, 1).flatten(0, 1), self.weight, ends, recipe=self.recipe).unflatten(
            0, (tokens, -1)
        )
        return (y if bias is None else y + bias.to(y.dtype)).transpose(0, 1)

    def _quantised(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.bias, recipe=self.recipe)

    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        if self.per_token:
            return multiplies_grouped_codes(self.weight, device)
        return multiplies_linear_codes(self.weight[0], QUANTIZED[recipe], device)

    def execution(self) -> str:
        if self.per_token:
            return grouped_execution(self.weight)
        return linear_execution(self.weight[0], QUANTIZED[self.recipe])


class TokenFeedForward(nn.Module):
    """y_t = W_out,t act(W_in,t z_t + b_t) + c_t for the T tokens of each row, weights as `TokenLinear` has them.

    z_t may be in two parts: `own` [C, T, in_dim] of each candidate behind `shared` [R, T, shared_dim] of its request.
    W_in is then two matrices, of which one multiplies once a request; what it gives is added without a copy. With
    `normalize`, z is RMSNorm(z) of both parts together: the candidate's one number comes after the product.

    `activation` None leaves one linear layer. `std` is that of W_out at first, 0 the usual one.
    """

    def __init__(
        self,
        num_tokens: int,
        in_dim: int,
        hidden: int,
        out_dim: int,
        *,
        shared_dim: int = 0,
        activation: str | None = "swiglu",
        per_token: bool = True,
        std: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shared_dim = shared_dim
        self.activation = activation
        width = out_dim if activation is None else hidden * (1 + (activation == "swiglu"))
        # Together the two are one map.
        options: dict[str, Any] = {"bias": False, "per_token": per_token, "fan_in": in_dim + shared_dim}
        self.own = TokenLinear(num_tokens, in_dim, width, **options)
        self.shared = TokenLinear(num_tokens, shared_dim, width, **options) if shared_dim else None
        self.bias = nn.Parameter(torch.empty(num_tokens if per_token else 1, width))
        self.output: TokenLinear | None = None
        if activation is not None:
            self.output = TokenLinear(num_tokens, hidden, out_dim, per_token=per_token, std=std)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(
        self,
        own: Tensor,
        shared: Tensor | None = None,
        rows: CandidateRows | None = None,
        *,
        normalize: bool = False,
    ) -> Tensor:
        if (self.shared is None) != (shared is None) or (shared is not None and rows is None):
            raise ValueError(
                f"the layer was built for {self.shared_dim} features of a request's tokens; give shared [R, T, "
                f"{self.shared_dim}] with its rows, or neither"
            )
        if self.shared is None or shared is None or rows is None:
            hidden = self.own(rms_norm(own) if normalize else own)
        else:
            hidden = rows.add(self.own(own), self.shared(shared))
            if normalize:
                total = rows.add(_squares(own), _squares(shared)) / (own.shape[2] + self.shared_dim)
                hidden = (hidden * (total + EPSILON).rsqrt()[..., None]).to(hidden.dtype)
        hidden = hidden + self.bias.to(hidden.dtype)
        if self.activation is None or self.output is None:
            return self.dropout(hidden)
        return self.dropout(self.output(ACTIVATIONS[self.activation](hidden)))


def _squares(x: Tensor) -> Tensor:
    """[N, T, width] -> [N, T], sums in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(2)

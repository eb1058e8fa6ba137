"""Layers in which each of T tokens has weights of its own: products of T groups that have the same number of rows.

No row is routed and no size is read from the device, so a step with these layers can be a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.moe import experts, is_fused, swiglu
from kernels.mxfp8 import (
    QUANTIZED,
    experts_execution,
    grouped_execution,
    grouped_mm,
    linear,
    linear_execution,
    multiplies_expert_codes,
    multiplies_grouped_codes,
    multiplies_linear_codes,
)
from kernels.tokens import EPSILON
from modules.broadcast import CandidateRows
from modules.layers.norms import rms_norm
from modules.precision import Quantizable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": swiglu, "gelu": F.gelu}
"""swiglu halves the width: silu(first half) * second half."""


class TokenLinear(Quantizable):
    """y_t = W_t x_t + b_t for the tokens t of each row: [N, T, in_dim] -> [N, T, out_dim].

    `weight` [T, out_dim, in_dim] starts like nn.Linear's. With `per_token=False` one [1, out_dim, in_dim] serves all
    tokens, of any number.
    """

    def __init__(
        self,
        num_tokens: int,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = True,
        per_token: bool = True,
    ) -> None:
        super().__init__()
        sets = num_tokens if per_token else 1
        self.weight = nn.Parameter(torch.empty(sets, out_dim, in_dim))
        # One dimension: precisions look at the last two of others.
        self.bias = nn.Parameter(torch.empty(sets * out_dim)) if bias else None
        self.per_token = per_token
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _start(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.bias, self.recipe, self.per_token)

    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        return _multiplies_codes(self.weight, recipe, device, self.per_token)

    def execution(self) -> str:
        return _execution(self.weight, self.recipe, self.per_token)


class TokenFeedForward(Quantizable):
    """y_t = W_out,t act(W_in,t z_t + b_t) + c_t for the T tokens of each row, weights as `TokenLinear` has them.

    z_t may be in two parts: `shared` [R, T, shared_dim] of a candidate's request before `own` [C, T, in_dim]. W_in is
    then two matrices, of which one multiplies once a request; what it gives is added without a copy. With `normalize`,
    z is RMSNorm(z) of both parts together: the candidate's one number comes after the product. Where SwiGLU without
    biases is one operator (`kernels.moe.experts`), z is put together instead: its copy costs less than what is saved.

    `activation` None leaves one linear layer. `bias` false leaves out b and c. `std` is that of W_out at first, 0 the
    usual one.
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
        bias: bool = True,
        std: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shared_dim, self.activation, self.per_token, self.std = shared_dim, activation, per_token, std
        width = out_dim if activation is None else hidden * (1 + (activation == "swiglu"))
        sets = num_tokens if per_token else 1
        self.w_in = nn.Parameter(torch.empty(sets, width, shared_dim + in_dim))
        self.b_in = nn.Parameter(torch.empty(sets * width)) if bias else None
        self.w_out = self.b_out = None
        if activation is not None:
            self.w_out = nn.Parameter(torch.empty(sets, out_dim, hidden))
            self.b_out = nn.Parameter(torch.empty(sets * out_dim)) if bias else None
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _start(self.w_in, None)
        if self.b_in is not None:
            nn.init.zeros_(self.b_in)
        if self.w_out is not None:
            _start(self.w_out, self.b_out, self.std)

    def forward(
        self,
        own: Tensor,
        shared: Tensor | None = None,
        rows: CandidateRows | None = None,
        *,
        normalize: bool = False,
    ) -> Tensor:
        if (not self.shared_dim) != (shared is None) or (shared is not None and rows is None):
            raise ValueError(
                f"the layer was built for {self.shared_dim} features of a request's tokens; give shared [R, T, "
                f"{self.shared_dim}] with its rows, or neither"
            )
        if self._is_one_operator(own):
            z = own if shared is None or rows is None else torch.cat([rows.expand(shared.to(own.dtype)), own], 2)
            return self.dropout(self._experts(rms_norm(z) if normalize else z))
        if shared is None or rows is None:
            hidden = self._in(rms_norm(own) if normalize else own, self.w_in)
        else:
            of_shared, of_own = self.w_in.split([self.shared_dim, own.shape[2]], 2)
            hidden = rows.add(self._in(own, of_own), self._in(shared, of_shared))
            if normalize:
                total = rows.add(_squares(own), _squares(shared)) / self.w_in.shape[2]
                hidden = (hidden * (total + EPSILON).rsqrt()[..., None]).to(hidden.dtype)
        if self.b_in is not None:
            hidden = hidden + self.b_in.to(hidden.dtype).view(self.w_in.shape[:2])
        if self.activation is not None and self.w_out is not None:
            hidden = ACTIVATIONS[self.activation](hidden)
            hidden = _product(hidden, self.w_out, self.b_out, self.recipe, self.per_token)
        return self.dropout(hidden)

    def _in(self, x: Tensor, weight: Tensor) -> Tensor:
        return _product(x, weight, None, self.recipe, self.per_token)

    def _is_one_operator(self, like: Tensor) -> bool:
        if not self._could_be_one_operator() or self.w_out is None:
            return False
        return is_fused(like, self.w_in, self.w_out, self.recipe)

    def _could_be_one_operator(self) -> bool:
        return self.per_token and self.activation == "swiglu" and self.b_in is None

    def _experts(self, z: Tensor) -> Tensor:
        """Experts of which each token's place chooses one."""
        assert self.w_out is not None
        count, tokens = z.shape[:2]
        place = torch.arange(tokens, device=z.device).repeat(count)[:, None]
        ones = torch.ones(place.shape, device=z.device)
        y = experts(z.flatten(0, 1), place, ones, self.w_in, self.w_out, recipe=self.recipe)
        return y.unflatten(0, (count, tokens))

    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        if self._could_be_one_operator() and self.w_out is not None:
            return multiplies_expert_codes(self.w_in, recipe, QUANTIZED[recipe], device, self.w_out.shape[1])
        return _multiplies_codes(self.w_in, recipe, device, self.per_token)

    def execution(self) -> str:
        if self._could_be_one_operator() and self.w_out is not None:
            return experts_execution(self.w_in, self.recipe, QUANTIZED[self.recipe], self.w_out.shape[1])
        return _execution(self.w_in, self.recipe, self.per_token)


def _start(weight: Tensor, bias: Tensor | None, std: float = 0.0) -> None:
    """As nn.Linear's, or with standard deviation `std` and biases of 0."""
    bound = 1 / math.sqrt(weight.shape[2])
    if std:
        nn.init.normal_(weight, std=std)
    else:
        nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.zeros_(bias) if std else nn.init.uniform_(bias, -bound, bound)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, per_token: bool) -> Tensor:
    """x [N, T, in] times weight [T, out, in], or [1, out, in] for all tokens, plus bias [sets * out]."""
    if not per_token:
        matrix = weight[0]
        return F.linear(x, matrix, bias) if recipe == "none" else linear(x, matrix, bias, recipe=recipe)
    rows = None if bias is None else bias.view(weight.shape[0], 1, -1)
    if recipe == "none":
        groups, matrices = x.transpose(0, 1), weight.mT
        y = torch.bmm(groups, matrices) if rows is None else torch.baddbmm(rows, groups, matrices)
        return y.transpose(0, 1)
    count, tokens = x.shape[:2]
    ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=x.device) * count
    y = grouped_mm(x.transpose(0, 1).flatten(0, 1), weight, ends, recipe=recipe).unflatten(0, (tokens, -1))
    return (y if rows is None else y + rows.to(y.dtype)).transpose(0, 1)


def _multiplies_codes(weight: Tensor, recipe: str, device: torch.device, per_token: bool) -> bool:
    if per_token:
        return multiplies_grouped_codes(weight, device)
    return multiplies_linear_codes(weight[0], QUANTIZED[recipe], device)


def _execution(weight: Tensor, recipe: str, per_token: bool) -> str:
    return grouped_execution(weight) if per_token else linear_execution(weight[0], QUANTIZED[recipe])


def _squares(x: Tensor) -> Tensor:
    """[N, T, width] -> [N, T], sums in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(2)

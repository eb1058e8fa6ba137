"""Multi-layer perceptrons and task heads, with Swish (SiLU) throughout as in InterFormer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import mxfp8
from kernels.tokens import activate, biased_linear, silu_mlp
from modules.broadcast import CandidateRows, request_part
from modules.core.vanilla import is_vanilla
from modules.precision import FP32Linear, MXLinear


class MLP(nn.Sequential):
    """Linear, SiLU, dropout for every width in `hidden`, then a plain linear layer when `out_dim` is given."""

    def __init__(self, in_dim: int, hidden: Sequence[int], out_dim: int | None = None, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(in_dim, width), nn.SiLU(), nn.Dropout(dropout)]
            in_dim = width
        if out_dim is not None:
            layers.append(nn.Linear(in_dim, out_dim))
        super().__init__(*layers)

    def forward(
        self,
        x: Tensor,
        factor: Tensor | None = None,
        *,
        request: Tensor | None = None,
        rows: CandidateRows | None = None,
    ) -> Tensor:
        """[..., in_dim] -> [..., last width], times `factor` if there is one.

        The first features may be a request's [R, num_request], with its rows; x [C, in_dim - num_request] has the rest.
        """
        layers = [layer for layer in self if not _drops_nothing(layer)]
        if request is not None and rows is not None:
            if not layers:
                return torch.cat([rows.expand(request), x], dim=1)
            x = linear_of_both(layers.pop(0), x, request, rows)
        while layers:
            layer = layers.pop(0)
            if layers and is_vanilla(layers[0], nn.SiLU):
                layers.pop(0)
                if len(layers) == 1 and _is_plain(layer) and _is_plain(layers[0]):
                    return _of_two(layer, layers[0], x, factor)
                if len(layers) == 1 and _is_quantised(layer) and _is_quantised(layers[0], layer.recipe):
                    weights = layer.weight, layer.bias, layers[0].weight, layers[0].bias
                    return mxfp8.silu_mlp(x, *weights, factor, recipe=layer.recipe)
                x = activated(layer, x, "silu")
            elif not layers and factor is not None:
                return activated(layer, x, factor=factor)
            else:
                x = layer(x)
        return x if factor is None else x * factor


def _drops_nothing(layer: nn.Module) -> bool:
    return is_vanilla(layer, nn.Dropout) and not (layer.p and layer.training)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return is_vanilla(layer, nn.Linear) and layer.bias is not None


def _is_quantised(layer: nn.Module, *recipes: str) -> TypeGuard[MXLinear]:
    """Whether it is plainly quantised, by one of the recipes if some are named."""
    return is_vanilla(layer, MXLinear) and layer.bias is not None and layer.recipe in (recipes or mxfp8.QUANTIZED)


def _of_two(inner: nn.Linear, outer: nn.Linear, x: Tensor, factor: Tensor | None) -> Tensor:
    """outer(silu(inner(x))), times `factor` if there is one."""
    if factor is None:
        return silu_mlp(x, inner.weight, inner.bias, outer.weight, outer.bias)
    product = silu_mlp(x, inner.weight, inner.bias, outer.weight)
    if factor.dtype == product.dtype:
        return activate(product, outer.bias, factor=factor)
    return activate(product, outer.bias) * factor


class SharedLinear(nn.Module):
    """Linear layer over features of which the last `num_request` are a request's, the same for all its candidates.

    y[c] = (W_own candidate[c] + b) + W_shared request[owner(c)]: the second product is computed once a request, and
    adding it is the only broadcast. Both weights are initialised as parts of one. Without features of a request this is
    `layer` itself.

    With `one_weight` they are columns of one weight, `own`, the request's first, or in the places that `order` [inputs]
    int64 gives: feature i of [request | candidate] has column order[i].
    """

    order: Tensor | None

    def __init__(
        self,
        num_candidate: int,
        num_request: int,
        out_dim: int,
        *,
        bias: bool = True,
        layer: type[nn.Linear] = nn.Linear,
        one_weight: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_request = num_request
        self.own = layer(num_candidate + num_request * one_weight, out_dim, bias=bias)
        self.shared = layer(num_request, out_dim, bias=False) if num_request and not one_weight else None
        self.register_buffer("order", order, persistent=False)
        bound = (num_candidate + num_request) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate], request [R, num_request] with its rows -> [C, out_dim]."""
        given = request_part(self.num_request, request, rows, "features")
        if given is None:
            return self.own(candidate)
        request, rows = given
        if self.shared is None:
            return linear_of_both(self.own, candidate, request, rows, self.order)
        return rows.add(self.own(candidate), self.shared(request))


class TaskHeads(nn.Module):
    """One MLP of its own for each task: [C, num_candidate] -> logits [C, tasks].

    Tasks do not share the MLP, since they share everything below it already. Logits are computed in fp32 under any
    precision: in bf16 they would have 8 significant bits, and the many equal scores would blur AUC.
    `num_request` further features may be a request's; for these, `one_weight` and `order` see `SharedLinear`.
    """

    def __init__(
        self,
        num_candidate: int,
        hidden: Sequence[int],
        num_tasks: int,
        dropout: float = 0.0,
        num_request: int = 0,
        *,
        one_weight: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_request = num_request
        of_both: dict[str, Any] = {"one_weight": one_weight, "order": order}

        def first() -> SharedLinear:
            if hidden:
                return SharedLinear(num_candidate, num_request, hidden[0], **of_both)
            return SharedLinear(num_candidate, num_request, 1, layer=FP32Linear, **of_both)

        def trunk() -> nn.Sequential:
            layers = [nn.SiLU(), nn.Dropout(dropout), *MLP(hidden[0], hidden[1:], dropout=dropout)] if hidden else []
            return nn.Sequential(*layers, *([FP32Linear(hidden[-1], 1)] if hidden else []))

        self.first = nn.ModuleList(first() for _ in range(num_tasks))
        self.trunks = nn.ModuleList(trunk() for _ in range(num_tasks))

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate] and, if built for them, request [R, num_request] with its rows."""
        pairs = zip(self.first, self.trunks, strict=True)
        return torch.cat([trunk(first(candidate, request, rows)) for first, trunk in pairs], dim=-1)


def linear_of_both(
    layer: nn.Module, candidate: Tensor, request: Tensor, rows: CandidateRows, order: Tensor | None = None
) -> Tensor:
    """layer([request of c | candidate[c]]) for each candidate c: [C, n], [R, m] with its rows -> [C, out].

    The product with the request's columns of the weight is computed once a request. `order` as in `SharedLinear`. A
    layer that is not plain is called, on copies of the requests.
    """
    if is_vanilla(layer, FP32Linear):
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        with torch.autocast(candidate.device.type, enabled=False):
            return _of_both(layer, candidate.to(dtype), request.to(dtype), rows, order)
    if is_vanilla(layer, nn.Linear):
        return _of_both(layer, candidate, request, rows, order)
    features = torch.cat([rows.expand(request), candidate], dim=1)
    if order is not None:
        features = torch.empty_like(features).index_copy(1, order, features)
    return layer(features)


def _of_both(layer: nn.Linear, candidate: Tensor, request: Tensor, rows: CandidateRows, order: Tensor | None) -> Tensor:
    weight = layer.weight if order is None else layer.weight.index_select(1, order)
    split = request.shape[1]
    return rows.add(F.linear(candidate, weight[:, split:], layer.bias), F.linear(request, weight[:, :split]))


def projected(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x) for many rows x: where the layer is plain, a kernel makes the gradient of its bias."""
    if is_vanilla(layer, nn.Linear) and layer.bias is not None:
        return biased_linear(x, layer.weight, layer.bias)
    return layer(x)


def activated(layer: nn.Module, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
    """activation(layer(x)) * factor: bias, activation ("none" or "silu") and factor in one pass over the product.

    The backward computes the gradient of the bias in its one pass, too. A layer that is neither plain nor plainly
    quantised is called, and adds its bias itself.
    """
    if (is_vanilla(layer, nn.Linear) or is_vanilla(layer, MXLinear)) and layer.bias is not None:
        z = layer.product(x) if isinstance(layer, MXLinear) else F.linear(x, layer.weight)
        if factor is None or factor.dtype == z.dtype:
            return activate(z, layer.bias, activation, factor)
        return activate(z, layer.bias, activation) * factor
    y = layer(x)
    y = F.silu(y) if activation == "silu" else y
    return y if factor is None else y * factor

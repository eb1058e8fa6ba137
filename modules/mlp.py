"""Multi-layer perceptrons and task heads, with Swish (SiLU) throughout as in InterFormer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.tokens import activate
from modules.broadcast import CandidateRows, request_part
from modules.plain import is_plain
from modules.precision import FP32Linear


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

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """[..., in_dim] -> [..., last width], times `factor` if there is one."""
        layers = list(self)
        while layers:
            layer = layers.pop(0)
            if layers and is_plain(layers[0], nn.SiLU):
                layers.pop(0)
                x = activated(layer, x, "silu")
            elif not layers and factor is not None:
                return activated(layer, x, factor=factor)
            else:
                x = layer(x)
        return x if factor is None else x * factor


class SharedLinear(nn.Module):
    """Linear layer over features of which the last `num_request` are a request's, the same for all its candidates.

    y[c] = (W_own candidate[c] + b) + W_shared request[owner(c)]: the second product is computed once a request, and
    adding it is the only broadcast. Both weights are initialised as parts of one. Without features of a request this is
    `layer` itself.
    """

    def __init__(
        self,
        num_candidate: int,
        num_request: int,
        out_dim: int,
        *,
        bias: bool = True,
        layer: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.own = layer(num_candidate, out_dim, bias=bias)
        self.shared = layer(num_request, out_dim, bias=False) if num_request else None
        bound = (num_candidate + num_request) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate], request [R, num_request] with its rows -> [C, out_dim]."""
        given = request_part(0 if self.shared is None else self.shared.in_features, request, rows, "features")
        y = self.own(candidate)
        if self.shared is None or given is None:
            return y
        request, rows = given
        return rows.add(y, self.shared(request))


class TaskHeads(nn.Module):
    """One MLP of its own for each task: [C, num_candidate] -> logits [C, tasks].

    Tasks do not share the MLP, since they share everything below it already. Logits are computed in fp32 under any
    precision: in bf16 they would have 8 significant bits, and the many equal scores would blur AUC.
    `num_request` further features may be a request's, see `SharedLinear`.
    """

    def __init__(
        self, num_candidate: int, hidden: Sequence[int], num_tasks: int, dropout: float = 0.0, num_request: int = 0
    ) -> None:
        super().__init__()

        def first() -> SharedLinear:
            if hidden:
                return SharedLinear(num_candidate, num_request, hidden[0])
            return SharedLinear(num_candidate, num_request, 1, layer=FP32Linear)

        def trunk() -> nn.Sequential:
            layers = [nn.SiLU(), nn.Dropout(dropout), *MLP(hidden[0], hidden[1:], dropout=dropout)] if hidden else []
            return nn.Sequential(*layers, *([FP32Linear(hidden[-1], 1)] if hidden else []))

        self.first = nn.ModuleList(first() for _ in range(num_tasks))
        self.trunks = nn.ModuleList(trunk() for _ in range(num_tasks))

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate] and, if built for them, request [R, num_request] with its rows."""
        pairs = zip(self.first, self.trunks, strict=True)
        return torch.cat([trunk(first(candidate, request, rows)) for first, trunk in pairs], dim=-1)


def activated(layer: nn.Module, x: Tensor, activation: str = "none", factor: Tensor | None = None) -> Tensor:
    """activation(layer(x)) * factor: bias, activation ("none" or "silu") and factor in one pass over the product.

    The backward computes the gradient of the bias in its one pass, too. A layer that is not plain is called, and
    adds its bias itself.
    """
    if is_plain(layer, nn.Linear) and layer.bias is not None:
        z = F.linear(x, layer.weight)
        if factor is None or factor.dtype == z.dtype:
            return activate(z, layer.bias, activation, factor)
        return activate(z, layer.bias, activation) * factor
    y = layer(x)
    y = F.silu(y) if activation == "silu" else y
    return y if factor is None else y * factor

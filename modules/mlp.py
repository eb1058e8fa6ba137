"""Multi-layer perceptrons and task heads, with Swish (SiLU) throughout as in InterFormer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from modules.broadcast import CandidateRows, shared_part
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


class SharedLinear(nn.Module):
    """Linear layer over features of which the last `num_shared` are a request's, the same for all its candidates.

    y[c] = (W_own own[c] + b) + W_shared shared[owner(c)]: the second product runs at the request's rows, and adding it
    is the only broadcast. Both weights start as parts of one. Without shared features this is `layer` itself.
    """

    def __init__(
        self, num_own: int, num_shared: int, out_dim: int, *, bias: bool = True, layer: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        self.own = layer(num_own, out_dim, bias=bias)
        self.shared = layer(num_shared, out_dim, bias=False) if num_shared else None
        bound = (num_own + num_shared) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, own: Tensor, shared: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """own [C, num_own], shared [R, num_shared] with its rows -> [C, out_dim]."""
        given = shared_part(0 if self.shared is None else self.shared.in_features, shared, rows, "features")
        y = self.own(own)
        if self.shared is None or given is None:
            return y
        shared, rows = given
        return rows.add(y, self.shared(shared))

    def flops(self, num_candidates: float, num_requests: float) -> float:
        shared = num_requests * linear_flops(self.shared) if self.shared is not None else 0
        return num_candidates * linear_flops(self.own) + shared


class TaskHeads(nn.Module):
    """One MLP of its own for each task: [C, in_dim] -> logits [C, tasks].

    Sharing the trunk between tasks would couple them once more; they share everything below already. Logits are
    computed in fp32 under any precision: in bf16 they would have 8 significant bits, and equal scores blur AUC.
    `shared_dim` further features may be a request's, see `SharedLinear`.
    """

    def __init__(
        self, in_dim: int, hidden: Sequence[int], num_tasks: int, dropout: float = 0.0, shared_dim: int = 0
    ) -> None:
        super().__init__()

        def first() -> SharedLinear:
            if hidden:
                return SharedLinear(in_dim, shared_dim, hidden[0])
            return SharedLinear(in_dim, shared_dim, 1, layer=FP32Linear)

        def trunk() -> nn.Sequential:
            layers = [nn.SiLU(), nn.Dropout(dropout), *MLP(hidden[0], hidden[1:], dropout=dropout)] if hidden else []
            return nn.Sequential(*layers, *([FP32Linear(hidden[-1], 1)] if hidden else []))

        self.first = nn.ModuleList(first() for _ in range(num_tasks))
        self.trunks = nn.ModuleList(trunk() for _ in range(num_tasks))

    def forward(self, x: Tensor, shared: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """x [C, in_dim] and, if built for them, shared [R, shared_dim] with its rows."""
        pairs = zip(self.first, self.trunks, strict=True)
        return torch.cat([trunk(first(x, shared, rows)) for first, trunk in pairs], dim=-1)

    def flops(self, num_candidates: float, num_requests: float) -> float:
        first = sum(layer.flops(num_candidates, num_requests) for layer in cast("Sequence[SharedLinear]", self.first))
        return first + num_candidates * linear_flops(self.trunks)


def linear_flops(module: nn.Module) -> int:
    """Forward FLOPs (2 * in * out) of one row through every `nn.Linear` inside `module`."""
    return sum(2 * layer.in_features * layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear))

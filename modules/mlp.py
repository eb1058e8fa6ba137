"""Multi-layer perceptrons and task heads, with Swish (SiLU) throughout as in InterFormer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


class TaskHeads(nn.Module):
    """One MLP of its own for each task: [C, in_dim] -> logits [C, tasks].

    Sharing the trunk between tasks would couple them once more; they share everything below already. Logits are
    computed in fp32 under any precision: in bf16 they would have 8 significant bits, and equal scores blur AUC.
    """

    def __init__(self, in_dim: int, hidden: Sequence[int], num_tasks: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(MLP(in_dim, hidden, dropout=dropout) for _ in range(num_tasks))
        self.logits = nn.ModuleList(FP32Linear(hidden[-1] if hidden else in_dim, 1) for _ in range(num_tasks))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([logit(trunk(x)) for trunk, logit in zip(self.trunks, self.logits, strict=True)], dim=-1)


def linear_flops(module: nn.Module) -> int:
    """Forward FLOPs (2 * in * out) of one row through every `nn.Linear` inside `module`."""
    return sum(2 * layer.in_features * layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear))

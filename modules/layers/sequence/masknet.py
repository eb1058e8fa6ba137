"""MaskNet over the aligned fields of a behaviour sequence."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.core import dispatch
from modules.layers.feed_forward.mlp import MLP, projected
from modules.layers.norms import row_norm


class MaskNet(nn.Module):
    """MLP_lce(S * MLP_mask(S)): the k fields of each event, side by side, become one token (InterFormer 4.1).

    Open in the paper and chosen here, after MaskNet (arXiv 2102.07619): fields are normalised one by one, the mask has
    no sigmoid and a hidden layer twice as wide as its input, MLP_lce is one linear layer. Only fields that describe the
    same event belong side by side; sequences of different events are merged along time (`history`).
    `out_dim` is `dim` unless given.
    """

    def __init__(self, num_fields: int, dim: int, out_dim: int | None = None) -> None:
        super().__init__()
        width = num_fields * dim
        self.num_fields = num_fields
        self.mask = MLP(width, [2 * width], width)
        self.output = nn.Linear(width, dim if out_dim is None else out_dim)

    def forward(self, values: Tensor) -> Tensor:
        """[N, num_fields * dim] -> [N, out_dim]."""
        # Rows of tables are float32; under autocast everything computed from them here has autocast's dtype.
        fields = values.unflatten(1, (self.num_fields, -1))
        normed, factor = row_norm(fields, dtype=dispatch.autocast_dtype(values), twice=True)
        return projected(self.output, self.mask(normed.flatten(1), factor.flatten(1)))

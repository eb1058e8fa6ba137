"""The peer "torch padded" of the jagged operators' benchmark: the same mathematics on padded tensors.

Padding the inputs and removing the padding of results is not timed, so this is the cost in a model that keeps
everything padded: the work and the memory of padding, but no conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import jagged
from kernels.jagged import reference


@dataclass(frozen=True)
class Padded:
    """`function` of padded tensors; `inputs` and `out` name their layouts, see `Layouts`."""

    function: Callable[..., Tensor]
    inputs: tuple[str, ...]
    out: str
    fill: float = 0.0


PEERS = {
    "jagged_dense_bmm": Padded(torch.bmm, ("jagged", "dense"), "jagged"),
    "jagged_jagged_bmm": Padded(lambda x, y: torch.bmm(x.mT, y), ("jagged", "jagged"), "dense"),
    "jagged_softmax": Padded(lambda x: x.softmax(1), ("jagged",), "jagged", fill=-torch.inf),
    "jagged_jagged_bmm_jagged_out": Padded(lambda x, y: torch.bmm(x, y.mT), ("jagged", "jagged"), "square"),
    "array_jagged_bmm_jagged_out": Padded(torch.bmm, ("square", "jagged"), "jagged"),
    "jagged2_softmax": Padded(lambda a: a.softmax(2), ("square",), "square", fill=-torch.inf),
    "jagged_linear": Padded(
        lambda x, weight, bias, row_bias: F.gelu(F.linear(x, weight, bias) + row_bias[:, None]),
        ("jagged", "dense", "dense", "dense"),
        "jagged",
    ),
    "jagged_dense_elementwise": Padded(lambda x, y: F.silu(x * y[:, None]), ("jagged", "dense"), "jagged"),
    "jagged_elementwise": Padded(lambda x, y: F.silu(x * y), ("jagged", "jagged"), "jagged"),
}


class Layouts:
    """Pads and cuts back: 'jagged' [N, W] to [B, L, W], 'square' [sum of L_b^2] to [B, L, L]; 'dense' stays so."""

    def __init__(self, offsets: Tensor, maximum: int, total: int, total_squared: int) -> None:
        self.offsets, self.maximum, self.total = offsets, maximum, total
        place, column = reference._square_places(offsets, jagged.squared_offsets(offsets), total_squared)
        row, position = reference.place_in_row(offsets, total)
        self.square_index = (row * maximum + position)[place] * maximum + column
        self.real = torch.arange(maximum, device=offsets.device) < offsets.diff()[:, None]

    def pad(self, layout: str, tensor: Tensor, fill: float = 0.0) -> Tensor:
        if layout == "jagged":
            return reference.jagged_to_padded(tensor, self.offsets, self.maximum, fill, "first")
        if layout == "square":
            rows, length = self.offsets.shape[0] - 1, self.maximum
            flat = tensor.new_full((rows * length * length,), fill).index_copy(0, self.square_index, tensor)
            # The softmax of a row of only -inf would be NaN.
            return flat.view(rows, length, length).masked_fill(~self.real[:, :, None], 0.0)
        return tensor.clone()

    def cut(self, layout: str, tensor: Tensor) -> Tensor:
        if layout == "jagged":
            return reference.padded_to_jagged(tensor, self.offsets, self.total)
        return tensor.flatten().index_select(0, self.square_index) if layout == "square" else tensor

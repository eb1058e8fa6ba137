"""Checks of a module's inputs, with errors in the module's own words."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.core.dispatch import autocast_dtype
from kernels.jagged import check_lengths

PADDED = "; rows of padded [B, L, d] become jagged by kernels.jagged.padded_to_jagged"


def check_tokens(tokens: Tensor, width: int, layer: nn.Module | None = None) -> None:
    """ValueError unless `tokens` are jagged, [N, width], and `layer`, which takes them first, multiplies their dtype.

    Padded tokens would be taken for jagged ones where their number happens to fit.
    """
    if not isinstance(tokens, Tensor):  # a proxy of a trace
        return
    if tokens.dim() != 2 or tokens.shape[1] != width:
        hint = PADDED if tokens.dim() == 3 else ""
        raise ValueError(f"values must be [N, dim={width}] beside their offsets, got {list(tokens.shape)}{hint}")
    check_dtype(tokens, layer, "values")


def check_dtype(x: Tensor, layer: nn.Module | None, name: str) -> None:
    """ValueError unless `layer` multiplies x: both have one floating dtype, or autocast gives them one."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating, got {x.dtype}; e.g. {name}.float()")
    # Other classes, such as quantised layers, convert their input themselves.
    if type(layer) is nn.Linear and autocast_dtype(x) != autocast_dtype(layer.weight):
        raise ValueError(
            f"{name} are {x.dtype} and the module's weights {layer.weight.dtype}; they must be alike outside autocast, "
            f"e.g. {name}.to({layer.weight.dtype})"
        )


def check_maximum(offsets: Tensor, maximum: int, name: str) -> None:
    """ValueError if a row is longer than `maximum`, the constant `name` of a module. Checked on the CPU only.

    On a GPU the operator that the module calls has a device assertion, and a second one is not needed.
    """
    if type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        check_lengths(offsets, maximum, name)

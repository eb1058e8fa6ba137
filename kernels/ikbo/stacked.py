"""Linear layers that write their results one after the other into one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from kernels.core import dispatch


# Of `kernels.core.operator`s autograd sees no tensors inside lists.
@torch.library.custom_op("gemsmith::stacked_linear", mutates_args=())
def _stacked_linear(inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    total, width = sum(x.shape[0] for x in inputs), weights[0].shape[0]
    out = inputs[0].new_empty(total, width)
    start = 0
    for x, weight in zip(inputs, weights, strict=True):
        torch.mm(x, weight.mT, out=out[start : start + x.shape[0]])
        start += x.shape[0]
    return out


@_stacked_linear.register_fake
def _(inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    return inputs[0].new_empty(sum(x.shape[0] for x in inputs), weights[0].shape[0])


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
    saved = ctx.saved_tensors
    inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
    parts = grad.split([x.shape[0] for x in inputs])
    of_inputs, of_weights = ctx.needs_input_grad
    return (
        [part @ weight if needed else None for part, weight, needed in zip(parts, weights, of_inputs, strict=True)],
        [part.mT @ x if needed else None for part, x, needed in zip(parts, inputs, of_weights, strict=True)],
    )


_stacked_linear.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.gemsmith.stacked_linear, get_raw=True)
def _flops(inputs: list[Tensor], weights: list[Tensor], *, out_val: Tensor) -> int:
    return sum(2 * x.numel() * weight.shape[0] for x, weight in zip(inputs, weights, strict=True))


def _transformed() -> bool:
    """Whether derivatives are asked for that the operator has not: forward mode would take them for zero."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def stacked_linear(inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """cat([x @ weight^T for each pair]) without the copy: inputs [N_i, D_i] and weights [E, D_i] -> [sum N_i, E].

    All have one dtype; in an autocast region they take its dtype.
    """
    if len(inputs) != len(weights):
        raise ValueError(f"every input needs a weight, got {len(inputs)} inputs and {len(weights)} weights")
    shapes = [(tuple(x.shape), tuple(weight.shape)) for x, weight in zip(inputs, weights, strict=True)]
    if not shapes or any(
        len(x) != 2 or len(weight) != 2 or x[1] != weight[1] or weight[0] != shapes[0][1][0] for x, weight in shapes
    ):
        raise ValueError(f"expected pairs of inputs [N_i, D_i] and weights [E, D_i] with one E, got {shapes}")
    pairs = (("inputs", inputs), ("weights", weights))
    named = {f"{name}[{i}]": x for name, xs in pairs for i, x in enumerate(xs)}
    operands = dispatch.autocast_operands(**named)
    inputs, weights = list(operands[: len(inputs)]), list(operands[len(inputs) :])
    if not torch.compiler.is_compiling() and _transformed():
        return torch.cat([x @ weight.mT for x, weight in zip(inputs, weights, strict=True)])
    return _stacked_linear(inputs, weights)

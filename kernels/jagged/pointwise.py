"""Public functions of linear layers and element-wise operations on jagged values."""

from __future__ import annotations

from torch import Tensor

from kernels.core import dispatch
from kernels.core.checks import check_floating, check_offsets, check_rows
from kernels.core.dispatch import Backend, triton_floats
from kernels.jagged import reference
from kernels.jagged.reference import ACTIVATIONS, COMBINE


def jagged_elementwise(
    x: Tensor, y: Tensor, op: str = "add", activation: str = "none", *, backend: str | None = None
) -> Tensor:
    """activation(x op y) of two jagged tensors with the same offsets: x, y [N, ...] -> [N, ...]; op 'add' or 'mul'.

    Half-precision operands are combined in float32 and the result is rounded once.
    """
    _check_names(op, activation)
    check_floating(x, "x")
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and y {tuple(y.shape)} {y.dtype} must be alike")
    return dispatch.choose("jagged_elementwise", backend, x)(x, y, None, op, activation)


def jagged_dense_elementwise(
    x: Tensor, offsets: Tensor, y: Tensor, op: str = "add", activation: str = "none", *, backend: str | None = None
) -> Tensor:
    """activation(x[i] op y[b]) for i in row b: x [N, ...], y [B, ...] -> [N, ...]; op 'add' or 'mul'."""
    _check_names(op, activation)
    check_floating(x, "x")
    check_offsets(x.shape[0], offsets)
    check_rows(y, offsets, "y")
    if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype} and y {tuple(y.shape)} {y.dtype} must be alike but for their first size"
        )
    return dispatch.choose("jagged_elementwise", backend, x)(x, y, offsets, op, activation)


def jagged_linear(
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    row_bias: Tensor | None = None,
    activation: str = "none",
    *,
    backend: str | None = None,
) -> Tensor:
    """activation(x[i] @ weight^T + bias + row_bias[b]) for i in row b: x [N, D] -> [N, E].

    weight [E, D] and bias [E] as in torch.nn.Linear; row_bias [B, E], for example a projection of what all places of a
    row share. All operands have one dtype; in an autocast region they take its dtype. `activation` is a key of
    ACTIVATIONS.
    """
    _check_names("add", activation)
    check_offsets(x.shape[0], offsets)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"expected x [N, D] and weight [E, D], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if row_bias is not None:
        check_rows(row_bias, offsets, "row_bias")
    for name, tensor in (("bias", bias), ("row_bias", row_bias)):
        if tensor is not None and tensor.shape[-1] != weight.shape[0]:
            raise ValueError(f"{name} {tuple(tensor.shape)} does not fit weight {tuple(weight.shape)}")
    x, weight, bias, row_bias = dispatch.autocast_operands(x=x, weight=weight, bias=bias, row_bias=row_bias)
    width, inner = weight.shape
    chosen = dispatch.choose("jagged_linear", backend, x, inner=inner, width=width)
    return chosen(x, offsets, weight, bias, row_bias, activation)


def _check_names(op: str, activation: str) -> None:
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, got {op!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


dispatch.declare(
    "jagged_elementwise",
    Backend("triton", "kernels.jagged.triton.elementwise:elementwise", triton_floats),
    Backend("reference", reference.jagged_elementwise),
)
dispatch.declare(
    "jagged_linear",
    Backend("triton", "kernels.jagged.triton.linear:jagged_linear", triton_floats),
    Backend("reference", reference.jagged_linear),
)


@dispatch.flops("jagged_linear")
def _flops(x: Tensor, offsets: Tensor, weight: Tensor, *rest: object) -> float:
    return 2 * x.numel() * weight.shape[0]

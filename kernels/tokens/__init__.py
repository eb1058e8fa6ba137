"""What is done to each token by itself, in one pass over memory where PyTorch's operators make several.

The equations are in the README of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Literal, cast, overload

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.constants import EPSILON
from kernels.core.dispatch import FLOATS, Backend, needs_dtype, needs_triton, triton_floats
from kernels.tokens import reference
from kernels.tokens.limits import MANY, MAX_DEPTH, MAX_WIDTH
from kernels.tokens.parts import Split, Unbind
from kernels.tokens.rotation import project_qkv, rotate, rotate_qkv

__all__ = [
    "EPSILON",
    "activate",
    "add_rms_norm",
    "biased_linear",
    "concat_finite",
    "concat_tokens",
    "has_rows",
    "move_rows_",
    "place_rows",
    "project_qkv",
    "rms_norm",
    "rotate",
    "rotate_qkv",
    "silu_mlp",
    "split_tokens",
    "unbind",
    "zero_unless_",
]


def activate(
    z: Tensor, bias: Tensor, activation: str = "none", factor: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """activation(z + bias) * factor, or without the factor: what follows the product z [..., E] of a linear layer.

    bias is [E] of any floating dtype, factor like z, activation "none" or "silu". Computed in at least float32 and
    rounded once, to the dtype of z. ValueError for other shapes, dtypes and names.
    """
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(reference.ACTIVATIONS)}, got {activation!r}")
    if bias.shape != z.shape[-1:] or (factor is not None and (factor.shape, factor.dtype) != (z.shape, z.dtype)):
        raise ValueError(
            f"z {z.dtype} {tuple(z.shape)} takes a bias [{z.shape[-1]}] and a factor like z, got {tuple(bias.shape)} "
            f"and {None if factor is None else (factor.dtype, tuple(factor.shape))}"
        )
    chosen = dispatch.choose_in_eager("activate", backend, z, width=z.shape[-1], bias=bias.dtype)
    return cast(Tensor, chosen(z, bias, activation, factor))


def add_rms_norm(
    x: Tensor, change: Tensor | None, rows: Tensor | None = None, *, twice: bool = False, backend: str | None = None
) -> tuple[Tensor, ...]:
    """(x + change, `rms_norm` of that, rows of it) for x and change [N, D]; without a change, of x itself.

    `rows` [...] int64 must name each of 0 .. N - 1 at most once, which is not checked; -1 stands for a row of zeros.
    The third result is [..., D], and empty without `rows`. With `twice` the norm is also the fourth result, for a
    second reader: the gradients from both, and that of the first result, are added where the norm's is made, and not
    in a pass of their own.
    ValueError for shapes and dtypes that do not fit.
    """
    if x.dim() != 2 or not x.is_floating_point() or (change is not None and change.shape != x.shape):
        raise ValueError(
            f"x must be [N, D] of a floating type, and change like it or None; got {x.dtype} {tuple(x.shape)} and "
            f"{None if change is None else tuple(change.shape)}"
        )
    if rows is not None and rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64, got {rows.dtype}")
    if change is not None and change.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, change.dtype)
        x, change = x.to(dtype), change.to(dtype)
    chosen = dispatch.choose_in_eager("add_rms_norm", backend, x, width=x.shape[1])
    return cast("tuple[Tensor, ...]", chosen(x, change, rows, twice))


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor, *, backend: str | None = None) -> Tensor:
    """torch.nn.functional.linear(x, weight, bias): x [..., D] -> [..., E].

    For many rows: the gradient of the bias, a sum over them, is added up in float32 by a kernel as fast as memory is.
    ValueError for a bias other than [E].
    """
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}] for weight {tuple(weight.shape)}, got {tuple(bias.shape)}")
    return cast(Tensor, dispatch.choose_in_eager("biased_linear", backend, x, bias=bias.dtype)(x, weight, bias))


def _alike(parts: Sequence[Tensor], kind: Callable[[Tensor], object]) -> bool:
    """Whether there are any, all of one kind. Compared, not put into a set: sizes of a trace have no hash."""
    return len(parts) > 0 and all(kind(part) == kind(parts[0]) for part in parts)


def concat_finite(parts: Sequence[Tensor], *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(the rows of parts [N_i, D] one after the other, [sum N_i, D], 1 or 0 [] float32: whether all are finite).

    Without gradients. ValueError for no part, and for parts of several widths or dtypes.
    """
    if (
        not _alike(parts, lambda part: (part.dim(), part.shape[-1], part.dtype))
        or parts[0].dim() != 2
        or not parts[0].is_floating_point()
    ):
        shapes = [f"{part.dtype} {tuple(part.shape)}" for part in parts]
        raise ValueError(f"parts must be matrices of one width and one floating dtype, at least one; got {shapes}")
    chosen = dispatch.choose_in_eager("concat_finite", backend, parts[0])
    return cast("tuple[Tensor, Tensor]", chosen(list(parts)))


def concat_tokens(parts: Sequence[Tensor], added: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Tokens of parts [N, n_i, D] side by side, [N, sum n_i, D], plus `added`, of that shape, if there is any.

    In the widest of their dtypes, as torch.cat and a sum. PyTorch moves parts of larger tensors element by element, and
    adds in a pass of its own. ValueError for other shapes.
    """
    if not _alike(parts, lambda part: (part.dim(), part.shape[0], part.shape[-1])) or parts[0].dim() != 3:
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"parts must be at least one, [N, n, D] of one N and D; got {shapes}")
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    parts = [part if part.dtype is dtype else part.to(dtype) for part in parts]
    shape = parts[0].shape[0], sum(part.shape[1] for part in parts), parts[0].shape[2]
    if added is not None and added.shape != shape:
        raise ValueError(f"added must have the shape of all parts, {shape}, got {tuple(added.shape)}")
    return cast(Tensor, dispatch.choose_in_eager("concat_tokens", backend, parts[0])(parts, added))


def move_rows_(
    out: Tensor,
    rows: Tensor,
    places: Tensor,
    *,
    scatter: bool = False,
    divisor: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Write rows[places[i]] / divisor to out[i], or with `scatter` rows[i] / divisor to out[places[i]]; returns out.

    Without gradients. out and rows are matrices of one width and dtype, out contiguous, and places [N] int64, one for
    each row of out, or with `scatter` of rows; that they are within the other one is not checked. ValueError for
    others.
    """
    of = rows if scatter else out
    if out.dim() != 2 or (out.shape[1:], out.dtype) != (rows.shape[1:], rows.dtype) or not out.is_contiguous():
        raise ValueError(
            "out must be a contiguous matrix, and rows one of its width and dtype; got "
            f"{out.dtype} {tuple(out.shape)} and {rows.dtype} {tuple(rows.shape)}"
        )
    if places.shape != of.shape[:1] or places.dtype != torch.int64:
        raise ValueError(f"places must be int64 [{of.shape[0]}], got {places.dtype} {tuple(places.shape)}")
    chosen = dispatch.choose_in_eager("move_rows", backend, rows)
    return cast(Tensor, chosen(out, rows, places, scatter, divisor))


def place_rows(
    parts: Sequence[Tensor], places: Tensor, *, gradient_divisor: float = 1.0, backend: str | None = None
) -> Tensor:
    """Rows of parts [N_i, ...], counted through all of them, at `places` [N] int64 of one tensor [N, ...]; N = sum N_i.

    `places` must hold each of 0 .. N - 1 once, which is not checked. No row is read or written twice, and gradients go
    back the same way, over `gradient_divisor`. ValueError for parts of several shapes of rows or dtypes, and for other
    places.
    """
    if not _alike(parts, lambda part: (part.shape[1:], part.dtype)):
        shapes = [f"{part.dtype} {tuple(part.shape)}" for part in parts]
        raise ValueError(f"parts must be at least one, with rows of one shape and dtype; got {shapes}")
    total = sum(part.shape[0] for part in parts)  # whose number a trace may not know
    if places.shape != (total,) or places.dtype != torch.int64:
        raise ValueError(
            f"places must be int64 [{total}], one for each row of the parts, got {places.dtype} {tuple(places.shape)}"
        )
    return cast(
        Tensor, dispatch.choose_in_eager("place_rows", backend, parts[0])(list(parts), places, gradient_divisor)
    )


@overload
def rms_norm(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    epsilon: float = EPSILON,
    twice: Literal[False] = False,
    beside: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    epsilon: float = EPSILON,
    twice: bool = False,
    beside: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]: ...


def rms_norm(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    epsilon: float = EPSILON,
    twice: bool = False,
    beside: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """x / sqrt(mean(x^2) + epsilon) over the last dimension of x [..., D], in `dtype`; without one, in that of x.

    Statistics are at least float32. Zeros stay zeros with a finite gradient. With `twice` a tuple of it, for two
    readers, and with `beside` one that ends with x, for whoever reads that too: all gradients are added where that of x
    is made. ValueError for integers.
    """
    dtype = dtype or x.dtype
    for name, kind in (("x", x.dtype), ("dtype", dtype)):
        if not kind.is_floating_point:
            raise ValueError(f"{name} must be of a floating type, e.g. torch.bfloat16, got {kind}")
    chosen = dispatch.choose_in_eager("rms_norm", backend, x, width=x.shape[-1], out_dtype=dtype)
    return cast("Tensor | tuple[Tensor, ...]", chosen(x, dtype, epsilon, twice, beside))


def silu_mlp(
    x: Tensor,
    inner: Tensor,
    bias: Tensor,
    outer: Tensor,
    outer_bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """silu(x inner^T + bias) outer^T + outer_bias, two linear layers: x [..., D] -> [..., E].

    inner is [F, D], bias [F], outer [E, F] and outer_bias [E]; x and the weights are of one dtype, under autocast of
    its own, to which both layers and the activation are rounded. ValueError for other shapes and for several dtypes.
    """
    hidden = inner.shape[:1]
    fits = inner.dim() == outer.dim() == 2 and inner.shape[1:] == x.shape[-1:] and outer.shape[1:] == hidden
    if not fits or bias.shape != hidden or (outer_bias is not None and outer_bias.shape != outer.shape[:1]):
        raise ValueError(
            f"x {tuple(x.shape)} takes inner [F, {x.shape[-1]}], bias [F], outer [E, F] and outer_bias [E] or None; "
            f"got {tuple(inner.shape)}, {tuple(bias.shape)}, {tuple(outer.shape)} and "
            f"{None if outer_bias is None else tuple(outer_bias.shape)}"
        )
    x, inner, outer = dispatch.autocast_operands(x=x, inner=inner, outer=outer)
    facts = {"widths": tuple(map(int, (x.shape[-1], *outer.shape))), "bias": bias.dtype}
    many = not torch.compiler.is_compiling() and bool(x.numel() >= MANY * x.shape[-1])
    chosen = dispatch.choose_in_eager("silu_mlp", backend, x, many=many, **facts)
    return cast(Tensor, chosen(x, inner, bias, outer, outer_bias))


def split_tokens(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """x.split(sizes, 1) of tokens x [N, n, D], whose gradients are put together by `concat_tokens`."""
    if torch.compiler.is_compiling():
        return x.split(list(sizes), 1)
    return cast("tuple[Tensor, ...]", Split.apply(x, list(sizes), concat_tokens))


def unbind(x: Tensor) -> tuple[Tensor, ...]:
    """x.unbind(1) of a fused projection x [N, K, ...]. Gradients that already lie together as in x are not copied."""
    if torch.compiler.is_compiling():
        return x.unbind(1)
    return cast("tuple[Tensor, ...]", Unbind.apply(x))


def has_rows(x: Tensor) -> bool:
    """Whether x is [N, D] of contiguous rows that do not overlap, such as some columns of a wider matrix."""
    return x.dim() == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def zero_unless_(x: Tensor, condition: Tensor, *, backend: str | None = None) -> Tensor:
    """Write zeros over x, in place, if the number `condition` [] is 0; returns x. Without gradients.

    The host does not wait for the condition, and if it is another number, x is neither read nor written. ValueError for
    an x that neither is contiguous nor [N, D] of contiguous rows, and for a condition of another shape or elsewhere.
    """
    if not (x.is_contiguous() or has_rows(x)):
        raise ValueError(
            "x must be contiguous, or [N, D] of contiguous rows that do not overlap; got strides "
            f"{x.stride()} of {tuple(x.shape)}"
        )
    if condition.dim() or condition.device != x.device:
        raise ValueError(
            f"condition must be one number on {x.device}, e.g. torch.ones((), device=x.device); got "
            f"{tuple(condition.shape)} on {condition.device}"
        )
    return cast(Tensor, dispatch.choose_in_eager("zero_unless", backend, x)(x, condition))


def _activated(*, device: str, capability: Hashable, dtype: torch.dtype, width: int, bias: torch.dtype) -> str | None:
    if reason := needs_triton(device, capability) or needs_dtype(dtype, *FLOATS) or needs_dtype(bias, *FLOATS):
        return reason
    return None if width else "needs rows of at least one value"


def _biased(*, device: str, capability: Hashable, dtype: torch.dtype, bias: torch.dtype) -> str | None:
    return needs_triton(device, capability) or needs_dtype(dtype, *FLOATS) or needs_dtype(bias, *FLOATS)


def _added(*, width: int, dtype: torch.dtype, **facts: Hashable) -> str | None:
    return _normed(width=width, dtype=dtype, out_dtype=dtype, **facts)


def _normed(*, device: str, capability: Hashable, dtype: torch.dtype, width: int, out_dtype: torch.dtype) -> str | None:
    if reason := needs_triton(device, capability) or needs_dtype(dtype, *FLOATS) or needs_dtype(out_dtype, *FLOATS):
        return reason
    return None if 0 < width <= MAX_WIDTH else f"needs rows of 1 to {MAX_WIDTH} values, got {width}"


def _in_one(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    widths: tuple[int, int, int],
    bias: torch.dtype,
    many: bool,
) -> str | None:
    if reason := needs_triton(device, capability, (9, 0)) or needs_dtype(dtype, torch.bfloat16):
        return reason
    if reason := needs_dtype(bias, *FLOATS):
        return reason
    if any(width % 8 or not width for width in widths):
        return f"needs widths that are multiples of 8, got {', '.join(map(str, widths))}"
    if max(widths[0], widths[1]) > MAX_DEPTH:
        return f"products of more than {MAX_DEPTH} terms take longer than the activation does by itself"
    return None if many else f"needs {MANY} rows to fill the chip"


for _op, _function, _supports, _specification in (
    ("activate", "activation:activate", _activated, reference.activate),
    ("add_rms_norm", "residual:add_rms_norm", _added, reference.add_rms_norm),
    ("biased_linear", "bias:biased_linear", _biased, reference.biased_linear),
    ("concat_finite", "gradients:concat_finite", triton_floats, reference.concat_finite),
    ("concat_tokens", "placement:concat_tokens", triton_floats, reference.concat_tokens),
    ("move_rows", "placement:move_rows_", triton_floats, reference.move_rows_),
    ("place_rows", "placement:place_rows", triton_floats, reference.place_rows),
    ("rms_norm", "norm_operator:rms_norm", _normed, reference.rms_norm),
    ("zero_unless", "gradients:zero_unless_", triton_floats, reference.zero_unless_),
):
    dispatch.declare(
        _op,
        Backend("triton", f"kernels.tokens.triton.{_function}", _supports),
        Backend("reference", _specification),
    )
dispatch.declare(
    "silu_mlp",
    Backend("hopper", "kernels.tokens.hopper.silu_mlp:silu_mlp", _in_one),
    Backend("triton", "kernels.tokens.triton.activation:silu_mlp", lambda *, widths, many, **facts: _biased(**facts)),
    Backend("reference", reference.silu_mlp),
)

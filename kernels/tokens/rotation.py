"""Heads rotated by the angles of their tokens, by themselves, as parts of a projection, or in its product."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import FLOATS, Backend, needs_dtype, needs_triton
from kernels.tokens import reference
from kernels.tokens.limits import MANY, MAX_DEPTH, MAX_WIDTH, TURNED_HEADS


def project_qkv(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    heads: int,
    twice: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """`rotate_qkv` of the projection x weight^T: x [N, D], weight [3 * heads * d, D] -> (q, k, v), each [N, heads, d].

    x and the weight are of one dtype, under autocast of its own. ValueError for other shapes and for several dtypes.
    """
    # Not divmod, which Dynamo refuses for a size that is not fixed.
    width, rest = weight.shape[0] // (3 * heads), weight.shape[0] % (3 * heads)
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or rest:
        raise ValueError(
            f"x must be [N, D] and weight [3 * heads={heads} * d, D], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    x, weight = dispatch.autocast_operands(x=x, weight=weight)
    _check_angles((x.shape[0], heads, width), cos, sin, positions, "q [N, heads, d]")
    many = not torch.compiler.is_compiling() and bool(x.shape[0] >= MANY)
    facts = {"width": width, "depth": x.shape[1], "many": many, **_facts_of_angles(cos, sin)}
    chosen = dispatch.choose_in_eager("project_qkv", backend, x, **facts)
    return cast("tuple[Tensor, ...]", chosen(x, weight, cos, sin, positions, heads, twice))


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Rotate each head of x [N, H, d] by its token's angles; feature i is paired with feature i + d / 2.

    cos and sin are [N, d / 2], of any floating dtype, or, with `positions` [N] int64 or int32, tables [P, d / 2] of
    which token i has row positions[i]. Computed in at least float32; the result has the dtype of x. x may be a view of
    a fused projection, which is read without a copy. ValueError for shapes that do not fit; it is not checked that
    positions are within 0 .. P - 1.
    """
    _check_angles(x.shape, cos, sin, positions, "x [N, H, d]")
    return dispatch.choose_in_eager("rotate", backend, x, **_facts(x, cos, sin))(x, cos, sin, positions)


def rotate_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    twice: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """(q, k, v), each [N, H, d], of a fused projection [N, 3, H, d]; q and k are rotated as by `rotate`.

    v is a view. The three gradients are written into one tensor like the projection. With `twice`, (q, k, v, k, v), for
    keys and values that two attentions read: the gradients from both are added up as they are written.
    """
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise ValueError(f"qkv must be [N, 3, H, d], got {tuple(qkv.shape)}")
    _check_angles(qkv[:, 0].shape, cos, sin, positions, "qkv [N, 3, H, d]")
    chosen = dispatch.choose_in_eager("rotate_qkv", backend, qkv, **_facts(qkv, cos, sin))
    return cast("tuple[Tensor, ...]", chosen(qkv, cos, sin, positions, twice))


def _facts(x: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Hashable]:
    return {"width": x.shape[-1], **_facts_of_angles(cos, sin)}


def _facts_of_angles(cos: Tensor, sin: Tensor) -> dict[str, Hashable]:
    return {"angles": cos.dtype, "angles_learn": cos.requires_grad or sin.requires_grad}


def _check_angles(shape: Sequence[int], cos: Tensor, sin: Tensor, positions: Tensor | None, what: str) -> None:
    fits = len(shape) == 3 and shape[2] % 2 == 0 and cos.shape == sin.shape and cos.dim() == 2
    if fits and cos.shape[1] == shape[2] // 2:
        if positions is None and cos.shape[0] == shape[0]:
            return
        if positions is not None and positions.shape == shape[:1] and not positions.is_floating_point():
            return
    raise ValueError(
        f"shapes do not fit: {what} {tuple(shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, positions "
        f"{None if positions is None else tuple(positions.shape)}; expected an even d, cos and sin [N, d / 2], or "
        "[P, d / 2] with integer positions [N]"
    )


def _projected(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    width: int,
    depth: int,
    many: bool,
    angles: torch.dtype,
    angles_learn: bool,
) -> str | None:
    if reason := needs_triton(device, capability, (9, 0)) or needs_dtype(dtype, torch.bfloat16):
        return reason
    if width not in TURNED_HEADS:
        return f"needs heads of {' or '.join(map(str, TURNED_HEADS))} features, got {width}"
    if depth % 8 or depth > MAX_DEPTH:
        return f"needs inputs of a multiple of 8 features, up to {MAX_DEPTH}, got {depth}"
    if reason := needs_dtype(angles, *FLOATS):
        return reason
    if angles_learn:
        return "makes no gradient of cos and sin"
    return None if many else f"needs {MANY} rows to fill the chip"


def _rotated(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    width: int,
    angles: torch.dtype,
    angles_learn: bool,
) -> str | None:
    if reason := needs_triton(device, capability):
        return reason
    if reason := needs_dtype(dtype, *FLOATS) or needs_dtype(angles, *FLOATS):
        return reason
    if not 0 < width <= MAX_WIDTH:
        return f"needs heads of 2 to {MAX_WIDTH} features, got {width}"
    return "makes no gradient of cos and sin" if angles_learn else None


for _op in ("rotate", "rotate_qkv"):
    dispatch.declare(
        _op,
        Backend("triton", f"kernels.tokens.triton.rotary_operator:{_op}", _rotated),
        Backend("reference", getattr(reference, _op)),
    )
dispatch.declare(
    "project_qkv",
    Backend("hopper", "kernels.tokens.hopper.project_qkv:project_qkv", _projected),
    Backend(
        "triton", "kernels.tokens.triton.rotary_operator:project_qkv", lambda *, depth, many, **facts: _rotated(**facts)
    ),
    Backend("reference", reference.project_qkv),
)

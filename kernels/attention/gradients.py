"""Where the backward of attention writes its gradients."""

from __future__ import annotations

from torch import Tensor

from kernels.core.projection import last_part


def contiguous_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of q, k and v."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def gradients_beside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of q, k and v; if k and v are alike, theirs are parts of one [Nk, 2, Hkv, d].

    That is the gradient of a projection that made both, see `kernels.tokens.unbind`.
    """
    if k.shape != v.shape:
        return contiguous_gradients(q, k, v)
    return q.new_empty(q.shape), *k.new_empty(k.shape[0], 2, *k.shape[1:]).unbind(1)


def gradients_in_projection(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of q, k and v; if v has the strides of the last part of one [N, 3, H, d],
    dv is one, too, and if k and v have those of two parts of [N, 2, H, d], dk and dv are.

    Strides alone decide: compilers, which must know the layout beforehand, do not know where in its memory a part is.
    """
    num_tokens, num_heads, dim = v.shape
    width = num_heads * dim
    if num_tokens and k.stride() == v.stride() == (2 * width, dim, 1):
        return gradients_beside(q, k, v)
    if num_tokens == 0 or v.stride() != (3 * width, dim, 1):
        return contiguous_gradients(q, k, v)
    return q.new_empty(q.shape), k.new_empty(k.shape), last_part(v, 3)

"""Where the backward of attention writes its gradients."""

from __future__ import annotations

from torch import Tensor


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

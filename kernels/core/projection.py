"""Gradients of parts of a fused projection, written where the gradient of the whole will be.

Of a projection [N, K, ...] an operator may see only the last part as it is, and others after a further operator, as
attention sees values, and queries and keys that were rotated. Its gradient of the last part is then made as that of a
tensor like the projection, into which the further operator's backward writes the other gradients.
"""

from __future__ import annotations

from torch import Tensor

_FREE = "_gemsmith_free"
"""Marks a tensor [N, K, ...] of which only the last part means anything: the others may be written."""


def last_part(like: Tensor, parts: int) -> Tensor:
    """An empty tensor [N, ...], the last of the `parts` of one [N, parts, ...], for a gradient like `like`."""
    whole = like.new_empty(like.shape[0], parts, *like.shape[1:])
    setattr(whole, _FREE, True)
    return whole[:, -1]


def whole_of(last: Tensor, parts: int) -> Tensor | None:
    """The tensor [N, parts, ...] whose last part `last` is by `last_part`, to write the other parts into.

    None for any other tensor, and when it has been asked for before: somebody may have written to it since.
    """
    whole = last._base
    if whole is None or not getattr(whole, _FREE, False) or last.requires_grad:
        return None
    own = whole[:, -1]
    same = last.shape == own.shape and last.stride() == own.stride() and last.storage_offset() == own.storage_offset()
    if not same or whole.shape[1] != parts:
        return None
    setattr(whole, _FREE, False)
    return whole

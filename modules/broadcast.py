"""From request rows to candidate rows: what belongs to a request is computed once and broadcast as late as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.jagged import check_offsets, jagged_dense_elementwise, segment_sum

if TYPE_CHECKING:  # it needs TorchRec, which a user of one layer may not have
    from modules.batch import RequestBatch


class _Expand(torch.autograd.Function):
    """The gradient of a request is the sum over its candidates, which are contiguous: a segment sum.

    Indexing's own backward adds with atomics in the gradient's dtype; this is deterministic and sums in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return x.index_select(0, owner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        return segment_sum(grad, offsets), None, None


@dataclass(frozen=True)
class CandidateRows:
    """Which row each of C candidates belongs to; the candidates of row r are `offsets[r]:offsets[r + 1]`."""

    owner: Tensor  # [C] int64, non-decreasing
    offsets: Tensor  # [rows + 1] int64

    @classmethod
    def of(cls, batch: RequestBatch) -> CandidateRows:
        return cls(batch.owner, batch.candidate_offsets)

    @classmethod
    def of_offsets(cls, offsets: Tensor, num_candidates: int) -> CandidateRows:
        """From offsets [rows + 1] that end at `num_candidates`, the first size of the candidates' tensors.

        ValueError for offsets that end elsewhere, on the CPU only: on a GPU the check would wait for the device.
        """
        check_offsets(num_candidates, offsets)
        rows = torch.arange(offsets.shape[0] - 1, device=offsets.device)
        return cls(torch.repeat_interleave(rows, offsets.diff(), output_size=num_candidates), offsets)

    @classmethod
    def identity(cls, num_candidates: int, device: torch.device) -> CandidateRows:
        """Every candidate has a row of its own."""
        offsets = torch.arange(num_candidates + 1, device=device)
        return cls(offsets[:-1], offsets)

    def expand(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [C, ...]: each candidate gets its row."""
        if x.shape[0] != self.offsets.shape[0] - 1:
            raise ValueError(f"x has {x.shape[0]} rows and the offsets have {self.offsets.shape[0] - 1}")
        return _Expand.apply(x, self.owner, self.offsets)

    def add(self, x: Tensor, request: Tensor) -> Tensor:
        """x [C, ...] plus, for each candidate, its row of request [rows, ...], which is not copied to do so."""
        return self._combine(x, request, "add")

    def multiply(self, x: Tensor, request: Tensor) -> Tensor:
        """x [C, ...] times, for each candidate, its row of request [rows, ...], which is not copied to do so."""
        return self._combine(x, request, "mul")

    def _combine(self, x: Tensor, request: Tensor, op: str) -> Tensor:
        dtype = torch.promote_types(x.dtype, request.dtype)
        return jagged_dense_elementwise(x.to(dtype), self.offsets, request.to(dtype), op)


@dataclass(frozen=True)
class VendorTokens:
    """The tokens of vendors and their places: the middle level of a tree such as user, vendor, ad."""

    values: Tensor  # [V, n, d]
    of_request: CandidateRows  # the request of each vendor
    of_candidate: CandidateRows  # the vendor of each candidate

    @classmethod
    def of(cls, values: Tensor, batch: RequestBatch) -> VendorTokens:
        assert batch.vendors is not None
        of_request = _rows_of(batch.vendors.offsets, values.shape[0])
        return cls(values, of_request, _rows_of(batch.vendors.candidate_offsets, batch.num_candidates))

    def below(self, request: Tensor) -> Tensor:
        """[V, m + n, d]: for each vendor a copy of its request's tokens [R, m, d], then its own.

        To layers that know two levels, these are tokens of a request: nothing is copied to candidates.
        """
        return torch.cat([self.of_request.expand(request), self.values], dim=1)


def _rows_of(offsets: Tensor, total: int) -> CandidateRows:
    """`CandidateRows.of_offsets`, without the difference of offsets, by which an export would need two vendors."""
    check_offsets(total, offsets)
    places = torch.arange(total, device=offsets.device)
    return CandidateRows(torch.searchsorted(offsets, places, right=True) - 1, offsets)


def above_candidates(
    request: Tensor, vendor: Tensor | None, batch: RequestBatch, rows: CandidateRows
) -> tuple[Tensor, CandidateRows]:
    """(tokens above the candidates, the row of each candidate): those of requests [R, m, d], or with vendors [V, n, d]
    `VendorTokens.below`."""
    if vendor is None:
        return request, rows
    tokens = VendorTokens.of(vendor, batch)
    return tokens.below(request), tokens.of_candidate


torch.export.register_dataclass(CandidateRows)  # a layer that takes them can be exported by itself


def request_part(
    expected: int, request: Tensor | None, rows: CandidateRows | None, name: str
) -> tuple[Tensor, CandidateRows] | None:
    """The request's part of a layer's input, for a layer built for `expected` tokens or features (`name`) of a request.

    None if it was built for none. ValueError if it was built for none and gets some, if it was built for some and gets
    none, or if it gets them without their rows.
    """
    if request is None and not expected:
        return None
    if request is None or request.dim() < 2 or request.shape[1] != expected:
        given = "none" if request is None else f"a tensor {list(request.shape)}"
        raise ValueError(f"the layer was built for {expected} {name} of a request, got {given}")
    if rows is None:
        raise ValueError(f"{name} of a request come with rows=CandidateRows.of_offsets(offsets, num_candidates)")
    return request, rows

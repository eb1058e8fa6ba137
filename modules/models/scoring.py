"""An architecture on plain tensors, as `torch.export` takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from modules.batch import FeatureSpec, RequestBatch
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.rewrite import Report, ikbo_rewrite

IN_PROGRAM = "arch."
"""Before the names of a ranking model's weights, in a program of its `ScoringArch`."""

VendorInputs = tuple[Tensor, ...]
"""Tokens [V, n_v, d], offsets [R + 1] of the requests' vendors and [V + 1] of the vendors' candidates."""
Sequences = dict[str, tuple[Tensor, Tensor, Tensor]]
"""Values [N, width], offsets [R + 1] and times [N] of each event type."""


@dataclass(frozen=True)
class _Vendors:
    """What an architecture reads of `Vendors`."""

    offsets: Tensor
    candidate_offsets: Tensor


@dataclass(frozen=True)
class _Rows:
    """What an architecture reads of a `RequestBatch`."""

    candidate_offsets: Tensor
    num_requests: int
    num_candidates: int
    vendors: _Vendors | None

    owner = RequestBatch.owner


class _OnTensors(nn.Module):
    def __init__(self, arch: nn.Module) -> None:
        super().__init__()
        self.arch = arch

    def forward(
        self,
        request: Tensor,
        candidate: Tensor,
        candidate_offsets: Tensor,
        histories: Sequences,
        vendors: VendorInputs | None = None,
    ) -> Tensor:
        return self.arch(*arch_inputs(request, candidate, candidate_offsets, histories, vendors))


class ScoringArch(nn.Module):
    """logits [C, tasks] in float32 of the architecture, under autocast to `dtype` unless that is float32."""

    def __init__(self, arch: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.arch: nn.Module = _OnTensors(arch)
        self.dtype = dtype

    def rewrite(self, inputs: tuple[Any, ...], shapes: tuple[object, ...], max_candidates: int) -> Report:
        """Put what `ikbo_rewrite` makes of the architecture in its place. It looks into no region of autocast."""
        self.arch, report = ikbo_rewrite(self.arch, inputs, dynamic_shapes=shapes, max_candidates=max_candidates)
        return report

    def forward(
        self,
        request: Tensor,
        candidate: Tensor,
        candidate_offsets: Tensor,
        histories: Sequences,
        vendors: VendorInputs | None = None,
    ) -> Tensor:
        """request [R, n_u, d], candidate [C, n_c, d], candidate_offsets [R + 1]."""
        of_vendors = () if vendors is None else (vendors,)
        with torch.autocast(request.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            return self.arch(request, candidate, candidate_offsets, histories, *of_vendors).float()


def arch_inputs(
    request: Tensor,
    candidate: Tensor,
    candidate_offsets: Tensor,
    histories: Sequences,
    vendors: VendorInputs | None = None,
) -> tuple[Tokens, RequestBatch]:
    """The arguments of an architecture, from the tensors that `scoring_inputs` and `vendor_inputs` made of them."""
    sequences = {name: JaggedSequence(*parts) for name, parts in histories.items()}
    vendor, *offsets = vendors or (None,)
    rows = _Rows(candidate_offsets, request.shape[0], candidate.shape[0], _Vendors(*offsets) if offsets else None)
    return Tokens(request, candidate, sequences, vendor), cast(RequestBatch, rows)


def scoring_inputs(tokens: Tokens, candidate_offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Sequences]:
    """The arguments of `ScoringArch` before those of `vendor_inputs`."""
    histories = {name: (s.values, s.offsets, s.times) for name, s in tokens.histories.items()}
    return tokens.request, tokens.candidate, candidate_offsets, histories


def vendor_inputs(tokens: Tokens, batch: RequestBatch) -> tuple[VendorInputs, ...]:
    """The last argument of `ScoringArch`, where there are vendors."""
    if tokens.vendor is None or batch.vendors is None:
        return ()
    return ((tokens.vendor, batch.vendors.offsets, batch.vendors.candidate_offsets),)


def scoring_shapes(spec: FeatureSpec, max_candidates: int) -> tuple[object, ...]:
    """`dynamic_shapes` of `ScoringArch` for one request: candidates, vendors and events of each type are sizes of their
    own."""
    histories = {}
    for index, event in enumerate(spec.histories):
        events = Dim(f"events_{index}", min=0, max=event.max_length)
        histories[event.name] = ({0: events}, None, {0: events})
    vendors = Dim("vendors", min=1, max=max_candidates)
    of_vendors = (({0: vendors}, None, {0: vendors + 1}),) if spec.num_vendor_tokens else ()
    return None, {0: Dim("candidates", min=1, max=max_candidates)}, None, histories, *of_vendors

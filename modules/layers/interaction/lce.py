"""Linear compression of embeddings (LCE): a linear map over the token axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kernels.ikbo import linear_compression
from kernels.tokens import split_tokens
from modules.broadcast import CandidateRows, VendorTokens, request_part
from modules.core.vanilla import is_vanilla


class LCE(nn.Module):
    """Mix n tokens into `num_out`, Y = W X with W [num_out, n], the same for every feature of the width; no bias.

    When some tokens are a request's and the same for all its candidates, W splits into [W_request | W_candidate] and

        Y[c] = W_candidate X_candidate[c] + (W_request X_request)[owner(c)],

    so the request part is computed once a request and only its num_out tokens are broadcast, not its inputs. Tokens of
    vendors, between request and candidate, have a part of W as well, which is computed once a vendor.
    """

    def __init__(self, num_candidate: int, num_out: int, num_request: int = 0, num_vendor: int = 0) -> None:
        super().__init__()
        if num_vendor and not num_request:
            raise ValueError("tokens of vendors stand between those of requests and candidates; num_request is 0")
        self.candidate = nn.Linear(num_candidate, num_out, bias=False)
        self.request = nn.Linear(num_request, num_out, bias=False) if num_request else None
        self.vendor = nn.Linear(num_vendor, num_out, bias=False) if num_vendor else None
        # By default each part would scale by its own number of tokens; but together they are one map over all tokens.
        bound = (num_candidate + num_request + num_vendor) ** -0.5
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def forward(
        self,
        candidate: Tensor,
        request: Tensor | None = None,
        rows: CandidateRows | None = None,
        vendor: VendorTokens | None = None,
    ) -> Tensor:
        """candidate [C, num_candidate, d], request [R, num_request, d] with its rows, and if the layer was built for
        them the vendors' tokens [V, num_vendor, d] -> [C, num_out, d]."""
        plain = all(is_vanilla(layer, nn.Linear) for layer in self.children())  # any other layer must be called
        given = request_part(0 if self.request is None else self.request.in_features, request, rows, "tokens")
        if vendor is not None and self.vendor is None:
            raise ValueError(f"the layer was built for no tokens of a vendor, got {list(vendor.values.shape)}")
        if self.request is None or given is None:
            if plain:
                return linear_compression(candidate, [], self.candidate.weight, [], [])
            return self.candidate(candidate.mT).mT
        request, rows = given
        if self.vendor is not None:
            return self._of_tree(candidate, request, vendor, plain)
        if plain:
            return linear_compression(candidate, request, self.candidate.weight, self.request.weight, rows.offsets)
        return (self.candidate(candidate.mT) + rows.expand(self.request(request.mT))).mT

    def _of_tree(self, candidate: Tensor, request: Tensor, vendor: VendorTokens | None, plain: bool) -> Tensor:
        assert self.vendor is not None
        assert self.request is not None
        if vendor is None or vendor.values.shape[1] != self.vendor.in_features:
            given = "none" if vendor is None else f"a tensor {list(vendor.values.shape)}"
            raise ValueError(f"the layer was built for {self.vendor.in_features} tokens of a vendor, got {given}")
        above, below = vendor.of_request, vendor.of_candidate
        if plain:
            weights = [self.request.weight, self.vendor.weight]
            offsets = [above.offsets, below.offsets]
            return linear_compression(candidate, [request, vendor.values], self.candidate.weight, weights, offsets)
        own = self.vendor(vendor.values.mT) + above.expand(self.request(request.mT))
        return (self.candidate(candidate.mT) + below.expand(own)).mT


def compress_together(
    layers: Sequence[nn.Module],
    candidate: Tensor,
    request: Tensor | None = None,
    rows: CandidateRows | None = None,
    vendor: VendorTokens | None = None,
) -> list[Tensor]:
    """[layer(candidate, request, rows, vendor) for layer in layers] of compressions of the same tokens, as one product.

    The tokens are read once, forward and backward, and get one gradient instead of one of each layer to add up. Where a
    layer is not plain or has tokens of vendors, each is called.
    """
    if vendor is not None or not are_plain(layers):
        return [layer(candidate, request, rows, vendor) for layer in layers]
    plain = cast("Sequence[LCE]", layers)
    own = torch.cat([layer.candidate.weight for layer in plain])
    above = torch.cat([layer.request.weight for layer in plain if layer.request is not None] or [own[:, :0]])
    mixed = compressed(own, above, candidate, request, rows)
    return list(split_tokens(mixed, [layer.candidate.out_features for layer in plain]))


def are_plain(layers: Sequence[nn.Module]) -> bool:
    """Whether they are compressions without tokens of vendors, whose weights say all that they do."""
    return all(
        is_vanilla(layer, LCE)
        and layer.vendor is None
        and all(is_vanilla(part, nn.Linear) for part in layer.children())
        for layer in layers
    )


def compressed(
    own: Tensor, above: Tensor, candidate: Tensor, request: Tensor | None, rows: CandidateRows | None
) -> Tensor:
    """[C, m, d] of candidate tokens by own [m, num_candidate], and of a request's by above [m, num_request]."""
    given = request_part(above.shape[1], request, rows, "tokens")
    if given is None:
        return linear_compression(candidate, [], own, [], [])
    request, rows = given
    return linear_compression(candidate, request, own, above, rows.offsets)

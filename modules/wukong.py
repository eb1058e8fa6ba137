"""Wukong (arXiv 2403.02545): stacked factorisation machines over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modules.broadcast import CandidateRows, request_part
from modules.interaction import products_across
from modules.lce import LCE
from modules.mlp import MLP, linear_flops
from modules.norms import rms_norm


class WukongLayer(nn.Module):
    """Norm([FMB(X) | LCB(X)] + Res(X)): [C, n, d] -> [C, num_fmb + num_lcb, d].

    - FMB, the factorisation machine: the optimised form X (X^T Y) / sqrt(d) with Y [n, rank], normalised as one vector,
      through an MLP with `hidden` layers to num_fmb tokens;
    - LCB: num_lcb linear mixtures of the tokens;
    - Res: the tokens themselves where the layer keeps their number, linear mixtures of them elsewhere.

    Input tokens must be normalised, so that the factor keeps products at unit variance. The norms are RMSNorm without
    affine, as everywhere here; LCB and mixtures have no bias. Y is initialised like a linear layer over n tokens: unit
    variance, as in other implementations, would make products grow with n.

    The first `num_request` of n = num_request + num_candidate tokens belong to the request, are the same for all its
    candidates, and are given once a request. Every product that mixes tokens (Y^T X, LCB, Res) then computes its part
    of them once a request, and the products of a candidate with its request's tokens are one jagged product: nothing of
    a request is copied. A request has at most `max_candidates` candidates. The result has all tokens for every
    candidate.
    """

    def __init__(
        self,
        num_candidate: int,
        dim: int,
        *,
        num_fmb: int,
        num_lcb: int,
        rank: int,
        hidden: Sequence[int],
        dropout: float,
        num_request: int = 0,
        max_candidates: int = 1,
    ) -> None:
        super().__init__()
        num_tokens = num_candidate + num_request
        self.project = LCE(num_candidate, rank, num_request)
        self.fmb = MLP(num_tokens * rank, hidden, num_fmb * dim, dropout)
        self.lcb = LCE(num_candidate, num_lcb, num_request)
        keeps = num_tokens == num_fmb + num_lcb
        self.residual = None if keeps else LCE(num_candidate, num_fmb + num_lcb, num_request)
        self.num_tokens = num_tokens
        self.num_request = num_request
        self.rank = rank
        self.max_candidates = max_candidates
        self.dim = dim

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate, d] and, if built for them, request [R, num_request, d] with its rows."""
        given = request_part(self.num_request, request, rows, "tokens")
        projected = self.project(candidate, request, rows)
        products = torch.bmm(candidate, projected.mT)
        if given is not None:
            request, rows = given
            across = products_across(projected, request, rows, self.max_candidates).unflatten(1, (-1, self.num_request))
            products = torch.cat([across.mT, products], dim=1)
        machine = self.fmb(rms_norm(products.flatten(1) * self.dim**-0.5)).unflatten(1, (-1, self.dim))
        mixed = torch.cat([machine, self.lcb(candidate, request, rows)], dim=1)
        if self.residual is not None:
            return rms_norm(mixed + self.residual(candidate, request, rows))
        if given is None:
            return rms_norm(mixed + candidate)
        request, rows = given
        of_request, of_candidate = mixed.split([self.num_request, candidate.shape[1]], dim=1)
        return rms_norm(torch.cat([rows.add(of_request, request), of_candidate + candidate], dim=1))

    def flops(self, num_candidates: float, num_requests: float) -> float:
        mixtures = [self.project, self.lcb, *([] if self.residual is None else [self.residual])]
        flops = sum(mixture.flops(num_candidates, num_requests, self.dim) for mixture in mixtures)
        products = 2 * self.num_tokens * self.rank * self.dim
        return flops + num_candidates * (products + linear_flops(self.fmb))

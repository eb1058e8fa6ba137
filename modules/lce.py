"""Linear compression of embeddings (LCE): a linear map over the token axis."""

from __future__ import annotations

from torch import Tensor, nn

from kernels.ikbo import linear_compression
from modules.broadcast import CandidateRows, request_part
from modules.core.vanilla import is_vanilla


class LCE(nn.Module):
    """Mix n tokens into `num_out`, Y = W X with W [num_out, n], the same for every feature of the width; no bias.

    When some tokens are a request's and the same for all its candidates, W splits into [W_request | W_candidate] and

        Y[c] = W_candidate X_candidate[c] + (W_request X_request)[owner(c)],

    so the request part is computed once a request and only its num_out tokens are broadcast, not its inputs.
    """

    def __init__(self, num_candidate: int, num_out: int, num_request: int = 0) -> None:
        super().__init__()
        self.candidate = nn.Linear(num_candidate, num_out, bias=False)
        self.request = nn.Linear(num_request, num_out, bias=False) if num_request else None
        # By default each part would scale by its own number of tokens; but together they are one map over all tokens.
        bound = (num_candidate + num_request) ** -0.5
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate, d], request [R, num_request, d] with its rows -> [C, num_out, d]."""
        plain = all(is_vanilla(layer, nn.Linear) for layer in self.children())  # any other layer must be called
        given = request_part(0 if self.request is None else self.request.in_features, request, rows, "tokens")
        if self.request is None or given is None:
            if plain:
                return linear_compression(candidate, [], self.candidate.weight, [], [])
            return self.candidate(candidate.mT).mT
        request, rows = given
        if plain:
            return linear_compression(candidate, request, self.candidate.weight, self.request.weight, rows.offsets)
        return (self.candidate(candidate.mT) + rows.expand(self.request(request.mT))).mT

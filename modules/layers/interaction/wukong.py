"""Wukong (arXiv 2403.02545): stacked factorisation machines over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.core.offsets import scaled_offsets
from kernels.jagged import jagged_dense_bmm
from kernels.tokens import EPSILON
from modules.broadcast import CandidateRows, request_part
from modules.config import option
from modules.core.side_stream import SideStream
from modules.layers.feed_forward.mlp import MLP, SharedLinear
from modules.layers.interaction.dot_cross import DotInteraction, inner_products, products_across
from modules.layers.interaction.lce import LCE, compress_together
from modules.layers.norms import rms_norm

MACHINES = ("optimised", "plain", "attentive")


@dataclass
class WukongConfig:
    """Options of a layer's machine, see `WukongLayer`, as a configuration has them."""

    machine: str = option("optimised", choices=MACHINES)  # products X (X^T Y) | X X^T | with a Y of each candidate
    rank: int = option(8, least=1)  # columns of Y
    num_compressed: int = option(4, least=1)  # attentive: mixtures of tokens that Y is made from
    attention_hidden: list[int] = option([64], least=1)  # attentive: of the MLP that makes Y

    def machine_options(self) -> dict[str, Any]:
        """What `WukongLayer` takes of them."""
        return {each.name: getattr(self, each.name) for each in fields(WukongConfig)}


def in_section(section: str = "wukong") -> dict[str, str]:
    """Where keys of earlier versions, which stood beside those of the model, are now: for `ModelConfig.moved`."""
    return {each.name: f"{section}.{each.name}" for each in fields(WukongConfig)}


class WukongLayer(nn.Module):
    """Norm([FMB(X) | LCB(X)] + Res(X)): [C, n, d] -> [C, num_fmb + num_lcb, d].

    - FMB, the factorisation machine: products of tokens, normalised as one vector, through an MLP with `hidden` layers
      to num_fmb tokens;
    - LCB: num_lcb linear mixtures of the tokens;
    - Res: the tokens themselves where the layer keeps their number, linear mixtures of them elsewhere.

    `machine` says which products:

    - "optimised": X (X^T Y) / sqrt(d) with Y [n, rank] learned;
    - "plain": X X^T / sqrt(d), that is the products of all pairs of different tokens, each once;
    - "attentive": as optimised, but each candidate has a Y of its own, see `AttentiveCompression`, which is made from
      `num_compressed` mixtures of its tokens by an MLP with `attention_hidden` layers.

    Input tokens must be normalised, so that the factor keeps products at unit variance. The norms are RMSNorm without
    affine and take statistics in at least float32, as everywhere here; LCB and mixtures have no bias. Y is initialised
    like a linear layer over n tokens: unit variance, as in other implementations, would make products grow with n.

    The first `num_request` of n = num_request + num_candidate tokens belong to the request, are the same for all its
    candidates, and are given once a request. Every product that mixes tokens (Y^T X, LCB, Res) then computes its part
    of them once a request, and the products of a candidate with its request's tokens are one jagged product: nothing of
    a request is copied. A request has at most `max_candidates` candidates. The result has all tokens for every
    candidate.

    `block`, such as `feed_forward.block.FeedForwardBlock`, is applied to the tokens that the layer makes.
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
        machine: str = "optimised",
        num_compressed: int = 4,
        attention_hidden: Sequence[int] = (),
        block: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if machine not in MACHINES:
            raise ValueError(f"machine must be one of {', '.join(MACHINES)}, got {machine!r}")
        num_tokens = num_candidate + num_request
        shared: dict[str, Any] = {"num_request": num_request, "max_candidates": max_candidates}
        self.project: LCE | AttentiveCompression | None = None
        self.fmb: MLP | PairMachine
        if machine == "plain":
            self.fmb = PairMachine(num_candidate, dim, hidden, num_fmb * dim, dropout, **shared)
        elif machine == "attentive":
            shared |= {"num_compressed": num_compressed, "hidden": attention_hidden, "dropout": dropout}
            self.project = AttentiveCompression(num_candidate, dim, rank, **shared)
        else:
            self.project = LCE(num_candidate, rank, num_request)
        if machine != "plain":
            self.fmb = MLP(num_tokens * rank, hidden, num_fmb * dim, dropout)
        self.lcb = LCE(num_candidate, num_lcb, num_request)
        keeps = num_tokens == num_fmb + num_lcb
        self.residual = None if keeps else LCE(num_candidate, num_fmb + num_lcb, num_request)
        self.num_tokens = num_tokens
        self.num_out = num_fmb + num_lcb
        self.num_request = num_request
        self.rank = rank
        self.max_candidates = max_candidates
        self.dim = dim
        self.block = block

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate, d] and, if built for them, request [R, num_request, d] with its rows."""
        made = self._mixed(candidate, request, rows)
        return made if self.block is None else self.block(made)

    def _mixed(self, candidate: Tensor, request: Tensor | None, rows: CandidateRows | None) -> Tensor:
        given = request_part(self.num_request, request, rows, "tokens")
        optional = [self.project if isinstance(self.project, LCE) else None, self.residual]
        layers = [self.lcb, *(layer for layer in optional if layer is not None)]
        linear, *rest = compress_together(layers, candidate, request, rows)
        residual = None if self.residual is None else rest.pop()
        machine = self._machine(candidate, request, rows, *rest).unflatten(1, (-1, self.dim))
        mixed = torch.cat([machine, linear], dim=1)
        if residual is not None:
            return rms_norm(mixed + residual)
        if given is None:
            return rms_norm(mixed + candidate)
        request, rows = given
        of_request, of_candidate = mixed.split([self.num_request, candidate.shape[1]], dim=1)
        return rms_norm(torch.cat([rows.add(of_request, request), of_candidate + candidate], dim=1))

    def _machine(
        self, candidate: Tensor, request: Tensor | None, rows: CandidateRows | None, projected: Tensor | None = None
    ) -> Tensor:
        """[C, num_fmb * d]; `projected` is Y^T X if it is known."""
        if self.project is None:
            return self.fmb(candidate, request, rows)
        if projected is None:
            projected = self.project(candidate, request, rows)
        products = inner_products(candidate, projected)
        if request is not None and rows is not None:
            across = products_across(projected, request, rows, self.max_candidates).unflatten(1, (-1, self.num_request))
            products = torch.cat([across.mT, products], dim=1)
        return self.fmb(rms_norm(products.flatten(1) * self.dim**-0.5))


class AttentiveCompression(nn.Module):
    """Y^T X with a Y [n, num_out] of each candidate: [C, n, d] -> [C, num_out, d]. Tokens must be normalised.

    Y = MLP(Norm(W X)) / sqrt(n), W X [num_compressed, d] flattened, after the attentive machine of Wukong, which makes
    Y from a linear compression of the tokens. The factor keeps Y^T X from growing with n. Tokens of a request as in
    `WukongLayer`; they come first in Y.
    """

    def __init__(
        self,
        num_candidate: int,
        dim: int,
        num_out: int,
        *,
        num_compressed: int,
        hidden: Sequence[int],
        dropout: float,
        num_request: int = 0,
        max_candidates: int = 1,
    ) -> None:
        super().__init__()
        self.compress = LCE(num_candidate, num_compressed, num_request)
        self.weights = MLP(num_compressed * dim, hidden, num_out * (num_request + num_candidate), dropout)
        self.num_out = num_out
        self.num_candidate = num_candidate
        self.num_request = num_request
        self.max_candidates = max_candidates

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        compressed = rms_norm(self.compress(candidate, request, rows)).flatten(1)
        weights = self.weights(compressed) * (self.num_request + self.num_candidate) ** -0.5
        of_request, own = weights.unflatten(1, (self.num_out, -1)).split([self.num_request, self.num_candidate], dim=2)
        mixed = torch.bmm(own, candidate)
        if request is None or rows is None:
            return mixed
        # The weights of all candidates of a request are rows of one product with its tokens.
        offsets = scaled_offsets(rows.offsets, self.num_out)
        shared = jagged_dense_bmm(of_request.flatten(0, 1), offsets, request, self.max_candidates * self.num_out)
        return mixed + shared.view_as(mixed)


class PairMachine(nn.Module):
    """MLP(Norm(pairs)) of the inner products of all pairs i < j of n tokens: [C, n, d] -> [C, out_dim].

    The diagonal of X X^T is left out, because tokens are normalised. Products of a request's tokens with each other are
    computed once a request, and so is their part of the MLP's first layer; the norm, over all pairs of a candidate, is
    a factor of that layer's result.
    """

    def __init__(
        self,
        num_candidate: int,
        dim: int,
        hidden: Sequence[int],
        out_dim: int,
        dropout: float,
        *,
        num_request: int = 0,
        max_candidates: int = 1,
    ) -> None:
        super().__init__()
        self.dot = DotInteraction(num_candidate, scale=dim**-0.5)
        self.shared_dot = DotInteraction(num_request, scale=dim**-0.5) if num_request > 1 else None
        of_request = self.shared_dot.num_pairs if self.shared_dot is not None else 0
        of_candidate = self.dot.num_pairs + num_candidate * num_request
        if of_candidate == 0:
            raise ValueError("machine='plain' multiplies pairs of tokens, and there is one token; use 'optimised'")
        width, *widths = [*hidden, out_dim]
        self.first = SharedLinear(of_candidate, of_request, width, bias=False)
        self.bias = nn.Parameter(torch.empty(width))
        layers = [nn.SiLU(), nn.Dropout(dropout), MLP(width, widths[:-1], out_dim, dropout)] if hidden else []
        self.rest = nn.Sequential(*layers)
        self.num_pairs = of_candidate + of_request
        self.num_request = num_request
        self.max_candidates = max_candidates
        self.dim = dim
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        pairs, shared = self.dot(candidate), None
        if request is not None and rows is not None:
            pairs = torch.cat([pairs, self.dot.across(candidate, request, rows, self.max_candidates)], dim=1)
        squares = _sum_of_squares(pairs)
        if self.shared_dot is not None and request is not None and rows is not None:
            shared = self.shared_dot(request)
            squares = rows.add(squares, _sum_of_squares(shared))
        factor = (squares / self.num_pairs + EPSILON).rsqrt()
        hidden = self.first(pairs, shared, rows)
        return self.rest((hidden * factor + self.bias).to(hidden.dtype))


class WukongExperts(nn.Module):
    """Stacks of Wukong layers side by side, each on its share of the tokens: [C, n, d] -> [C, num_tokens, d].

    The mixture of Wukong experts of Kunlun (arXiv 2602.10016): the share is fixed, there is no router. Expert i takes
    every num_experts-th token from the i-th on, of the candidate's and of the request's each, so that tokens of one
    kind are spread over all; its num_fmb + num_lcb tokens follow those of expert i - 1. Tokens of a request, and other
    options, as in `WukongLayer`; each layer is followed by the next of its expert.
    """

    def __init__(
        self,
        num_candidate: int,
        dim: int,
        *,
        num_experts: int,
        num_layers: int,
        num_fmb: int,
        num_lcb: int,
        num_request: int = 0,
        max_candidates: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_experts > num_candidate:
            raise ValueError(
                f"num_experts={num_experts} share {num_candidate} tokens of a candidate, at least one each; use at "
                f"most num_experts={num_candidate}"
            )
        made = num_fmb + num_lcb
        options |= {"num_fmb": num_fmb, "num_lcb": num_lcb}

        def expert(index: int) -> nn.ModuleList:
            own, shared = (len(range(index, number, num_experts)) for number in (num_candidate, num_request))
            first = WukongLayer(own, dim, num_request=shared, max_candidates=max_candidates, **options)
            return nn.ModuleList([first, *(WukongLayer(made, dim, **options) for _ in range(num_layers - 1))])

        experts = nn.ModuleList(expert(index) for index in range(num_experts))
        self.experts = cast("Sequence[Sequence[WukongLayer]]", experts)
        self.num_tokens = num_experts * made
        self.num_request = num_request

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate, d] and, if built for them, request [R, num_request, d] with its rows."""
        request_part(self.num_request, request, rows, "tokens")
        number = len(self.experts)
        shares = _Deal.apply(candidate, number)
        shares_of_request = [None] * number if request is None else _Deal.apply(request, number)
        works, results = [], []
        for index, (first, *rest) in enumerate(self.experts):
            own, shared = shares[index], shares_of_request[index] if first.num_request else None
            with SideStream(own, shared, lane=index) as work:
                tokens = first(own, shared, rows if shared is not None else None)
                for layer in rest:
                    tokens = layer(tokens)
            works.append(work)
            results.append(tokens)
        return torch.cat([work.join(tokens) for work, tokens in zip(works, results, strict=True)], dim=1)


class _Deal(torch.autograd.Function):
    """The share of each of `number` experts, contiguous: tokens[:, i::number].

    Gradients are written side by side; those of slices would each be a tensor of zeros around them, to be added up.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, number: int) -> tuple[Tensor, ...]:
        # A copy of all tokens as well: see `kernels.mxfp8.matmul.as_dtype`.
        return tuple(tokens[:, i::number].clone(memory_format=torch.contiguous_format) for i in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        least = min(gradient.shape[1] for gradient in gradients)
        whole = torch.stack([gradient[:, :least] for gradient in gradients], 2).flatten(1, 2)
        rest = [gradient[:, least:] for gradient in gradients if gradient.shape[1] > least]
        return torch.cat([whole, *rest], 1) if rest else whole, None


def _sum_of_squares(pairs: Tensor) -> Tensor:
    """[rows, pairs] -> [rows, 1], in at least float32."""
    return pairs.to(torch.promote_types(pairs.dtype, torch.float32)).square().sum(1, keepdim=True)

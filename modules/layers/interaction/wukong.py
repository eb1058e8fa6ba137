"""Wukong (arXiv 2403.02545): stacked factorisation machines over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from kernels.core.operator import intercepted
from kernels.tokens import concat_tokens, split_tokens
from modules.broadcast import CandidateRows, request_part
from modules.config import option
from modules.core.side_stream import SideStream
from modules.layers.feed_forward.mlp import MLP
from modules.layers.interaction.dot_cross import inner_products, products_across
from modules.layers.interaction.lce import LCE, are_plain, compress_together, compressed
from modules.layers.norms import rms_norm


@dataclass
class WukongConfig:
    """Options of a layer, see `WukongLayer`, as a configuration has them."""

    num_fmb: int = option(8, least=1)  # tokens that a layer's factorisation machine makes
    num_lcb: int = option(8, least=1)  # tokens that its linear compression makes
    rank: int = option(8, least=1)  # columns of Y in the machine's products X (X^T Y)

    retired: ClassVar[dict[str, Any]] = {"machine": "optimised", "num_compressed": ..., "attention_hidden": ...}
    # For `ModelConfig.moved`: models of earlier versions had these beside their own.
    beside: ClassVar[dict[str, str]] = {key: f"wukong.{key}" for key in ("num_fmb", "num_lcb", "rank")}

    def layer_options(self) -> dict[str, Any]:
        """What `WukongLayer` takes of them."""
        return {each.name: getattr(self, each.name) for each in fields(WukongConfig)}


class WukongLayer(nn.Module):
    """Norm([FMB(X) | LCB(X)] + Res(X)): [C, n, d] -> [C, num_fmb + num_lcb, d].

    - FMB, the factorisation machine: products X (X^T Y) / sqrt(d) with Y [n, rank] learned, the paper's optimised form,
      normalised as one vector, through an MLP with `hidden` layers to num_fmb tokens;
    - LCB: num_lcb linear mixtures of the tokens;
    - Res: the tokens themselves where the layer keeps their number, linear mixtures of them elsewhere.

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
        block: nn.Module | None = None,
    ) -> None:
        super().__init__()
        num_tokens = num_candidate + num_request
        self.project = LCE(num_candidate, rank, num_request)
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
        if self.residual is not None and are_plain([self.residual, self.lcb, self.project]):
            return self._folded(self.residual, candidate, request, rows)
        layers = [self.lcb, self.project, *([] if self.residual is None else [self.residual])]
        linear, projected, *rest = compress_together(layers, candidate, request, rows)
        machine = self._machine(candidate, request, rows, projected)
        if rest or given is None:
            return rms_norm(concat_tokens([machine, linear], rest[0] if rest else candidate))
        request, rows = given
        mixed = concat_tokens([machine, linear])
        of_request, of_candidate = split_tokens(mixed, [self.num_request, candidate.shape[1]])
        return rms_norm(torch.cat([rows.add(of_request, request), of_candidate + candidate], dim=1))

    def _folded(self, residual: LCE, candidate: Tensor, request: Tensor | None, rows: CandidateRows | None) -> Tensor:
        """LCB and Res are both linear, so the sum of their tokens is one compression, by the sum of their weights."""

        def stacked(of_residual: Tensor, of_lcb: Tensor, of_project: Tensor) -> Tensor:
            return torch.cat([F.pad(of_lcb, (0, 0, self.num_out - len(of_lcb), 0)) + of_residual, of_project])

        layers = (residual, self.lcb, self.project)
        own = stacked(*(layer.candidate.weight for layer in layers))
        shared = [layer.request.weight for layer in layers if layer.request is not None]
        mixed = compressed(own, stacked(*shared) if shared else own[:, :0], candidate, request, rows)
        tokens, projected = split_tokens(mixed, [self.num_out, self.rank])
        return rms_norm(add_to_first(tokens, self._machine(candidate, request, rows, projected)))

    def _machine(
        self, candidate: Tensor, request: Tensor | None, rows: CandidateRows | None, projected: Tensor
    ) -> Tensor:
        """[C, num_fmb, d]; `projected` is Y^T X."""
        products = inner_products(candidate, projected)
        if request is not None and rows is not None:
            across = products_across(projected, request, rows, self.max_candidates).unflatten(1, (-1, self.num_request))
            products = torch.cat([across.mT, products], dim=1)
        return self.fmb(rms_norm(products.flatten(1) * self.dim**-0.5)).unflatten(1, (-1, self.dim))


def add_to_first(tokens: Tensor, others: Tensor) -> Tensor:
    """tokens [C, n, d], the first of which have others [C, m, d] added; in their memory, if nothing records it."""
    if torch.compiler.is_compiling() or intercepted((tokens, others)):
        return tokens + F.pad(others, (0, 0, 0, tokens.shape[1] - others.shape[1]))
    return cast(Tensor, _AddToFirst.apply(tokens, others))


class _AddToFirst(torch.autograd.Function):
    """Nobody may have saved `tokens`: autograd does not learn that they change, as it would copy all gradients then."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, others: Tensor) -> Tensor:
        ctx.number = others.shape[1]
        tokens.data[:, : ctx.number].add_(others)
        return tokens.view_as(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[:, : ctx.number]


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
        num_fmb: int,
        num_lcb: int,
        num_layers: int = 1,
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
            with SideStream(own, shared, lane=-1 - index) as work:  # others may be at work in those from 0 on
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
        return tuple(concat_tokens([tokens[:, i::number]]) for i in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        least = min(gradient.shape[1] for gradient in gradients)
        whole = torch.stack([gradient[:, :least] for gradient in gradients], 2).flatten(1, 2)
        rest = [gradient[:, least:] for gradient in gradients if gradient.shape[1] > least]
        return torch.cat([whole, *rest], 1) if rest else whole, None

"""Feature interaction over tokens [C, n, d]: inner products, cross network, and their ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.core import dispatch
from kernels.core.offsets import scaled_offsets
from kernels.jagged import jagged_dense_bmm
from kernels.tokens import concat_tokens
from modules.broadcast import CandidateRows, request_part
from modules.core.checks import check_maximum
from modules.layers.feed_forward.mlp import MLP, SharedLinear, linear_of_both
from modules.layers.norms import rms_norm


def inner_products(tokens: Tensor, others: Tensor) -> Tensor:
    """Inner products of each of tokens [C, n, d] with each of others [C, m, d]: [C, n, m]."""
    tokens, others = dispatch.autocast_operands(tokens=tokens, others=others)
    if torch.compiler.is_compiling():
        return torch.bmm(tokens, others.mT)
    return cast(Tensor, _InnerProducts.apply(tokens, others))


class _InnerProducts(torch.autograd.Function):
    """PyTorch's own gradient of `others` would be a transposed view, which whatever reads it next copies."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, others: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, others)
        return torch.bmm(tokens, others.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, others = ctx.saved_tensors
        return torch.bmm(grad, others), torch.bmm(grad.mT, tokens)


def gram(tokens: Tensor) -> Tensor:
    """Inner products of tokens [C, n, d] with each other: [C, n, n]."""
    (tokens,) = dispatch.autocast_operands(tokens=tokens)
    if torch.compiler.is_compiling():
        return torch.bmm(tokens, tokens.mT)
    return cast(Tensor, _Gram.apply(tokens))


class _Gram(torch.autograd.Function):
    """With one product in the backward, since both operands are the same."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return torch.bmm(tokens, tokens.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (tokens,) = ctx.saved_tensors
        return torch.bmm(grad + grad.mT, tokens)


def narrowed(x: Tensor, readers: int) -> Sequence[Tensor]:
    """x as autocast would hand it to each of so many products: rounded once.

    Gradients are added up in the dtype of x, as if each product had rounded it.
    """
    dtype = dispatch.autocast_dtype(x)
    if x.dtype is dtype or torch.compiler.is_compiling():
        return [x] * readers
    return cast("tuple[Tensor, ...]", _Narrowed.apply(x, dtype, readers))


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, readers: int) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        rounded = x.to(dtype)
        return (rounded, *(rounded.detach() for _ in range(readers - 1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        arrived = [grad for grad in grads if grad is not None]
        if not arrived:
            return None, None, None
        total = arrived[0].to(ctx.dtype)
        for grad in arrived[1:]:
            total.add_(grad)
        return total, None, None


class DotInteraction(nn.Module):
    """Inner products of all pairs i < j of n tokens: [C, n, d] -> [C, n (n - 1) / 2], multiplied by `scale`."""

    pairs: Tensor

    def __init__(self, num_tokens: int, scale: float = 1.0) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.scale = scale
        # On the CPU even if the default device is meta: no checkpoint would fill them in.
        pairs = torch.empty(0, dtype=torch.int64, device="cpu" if torch.empty(0).is_meta else None)
        self.register_buffer("pairs", pairs, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffer again, after `to_empty`."""
        row, column = torch.triu_indices(self.num_tokens, self.num_tokens, offset=1, device=self.pairs.device)
        self.pairs = row * self.num_tokens + column

    @property
    def num_pairs(self) -> int:
        return self.pairs.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """ValueError for another number of tokens than the pairs were made for."""
        if tokens.shape[1] != self.num_tokens:
            raise ValueError(f"the layer was built for {self.num_tokens} tokens, got a tensor {list(tokens.shape)}")
        # `index_select` of a hundred columns runs in a few blocks of a GPU.
        return gram(tokens).flatten(1).gather(1, self.pairs.expand(tokens.shape[0], -1)) * self.scale

    def across(self, tokens: Tensor, request: Tensor, rows: CandidateRows, max_candidates: int) -> Tensor:
        """`products_across`, multiplied by `scale`."""
        return products_across(tokens, request, rows, max_candidates) * self.scale


def products_across(tokens: Tensor, request: Tensor, rows: CandidateRows, max_candidates: int) -> Tensor:
    """Inner products of each token of a candidate with each of its request: [C, n, d], [R, m, d] -> [C, n m].

    `max_candidates` is a constant that no request exceeds.
    """
    num_tokens, num_request = tokens.shape[1], request.shape[1]
    check_maximum(rows.offsets, max_candidates, "max_candidates")
    # All tokens of a request's candidates are rows of one product with its tokens.
    tokens = tokens if tokens.is_contiguous() else concat_tokens([tokens])
    offsets = scaled_offsets(rows.offsets, num_tokens)
    products = jagged_dense_bmm(tokens.flatten(0, 1), offsets, request.mT, max_candidates * num_tokens)
    return products.view(-1, num_tokens * num_request)


class CrossNet(nn.Module):
    """Cross network of DCNv2 (arXiv 2008.13535) with low-rank weights: x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, x: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """[C, width] -> [C, width].

        The first features may be a request's [R, num_request], with its rows; x [C, width - num_request] has the rest.
        """
        if request is None or rows is None:
            crossed = x
            for down, up in zip(self.down, self.up, strict=True):
                crossed = x * up(down(crossed)) + crossed
            return crossed
        if not self.down:
            return torch.cat([rows.expand(request), x], dim=1)
        # x_l is x_0 times 1 and all that the layers before l add to it.
        split, gate = request.shape[1], torch.ones((), dtype=x.dtype, device=x.device)
        low = linear_of_both(self.down[0], x, request, rows)
        for index, up in enumerate(self.up):
            gate = gate + up(low if index == 0 else self.down[index](crossed))
            crossed = torch.cat([rows.multiply(gate[:, :split], request), x * gate[:, split:]], dim=1)
        return crossed


ENSEMBLES = ("dhen", "dot", "dcnv2")


class DHENLayer(nn.Module):
    """One layer of DHEN (arXiv 2203.11014), Y = Norm(DOT(X) + DCN(X) + X): [C, n, d] -> [C, n, d].

    `ensemble` "dot" or "dcnv2" leaves out the other one of the two.

    Chosen here: the ensemble is a sum; inner products go through an MLP with `hidden` layers to n x d; DCN is one
    cross layer; the norm is over the width of each token. Its place after the sum is DHEN's own.

    The first `num_request` of n = num_request + num_candidate tokens are a request's, the same for all its candidates.
    They are given at the request's rows and never copied to candidates: products of them alone run at requests, and a
    request has at most `max_candidates` of them. The result has all tokens for every candidate.
    """

    def __init__(
        self,
        num_candidate: int,
        dim: int,
        *,
        rank: int = 32,
        hidden: Sequence[int],
        dropout: float,
        num_request: int = 0,
        max_candidates: int = 1,
        ensemble: str = "dhen",
    ) -> None:
        super().__init__()
        if ensemble not in ENSEMBLES:
            raise ValueError(f"ensemble must be one of {', '.join(ENSEMBLES)}, got {ensemble!r}")
        num_tokens = num_candidate + num_request
        widths = [*hidden, num_tokens * dim]
        self.dots, self.crosses = ensemble != "dcnv2", ensemble != "dot"
        if self.dots:
            # Tokens come normalised, so this keeps inner products at unit variance whatever the width.
            self.dot = DotInteraction(num_candidate, scale=dim**-0.5)
            self.shared_dot = DotInteraction(num_request, scale=dim**-0.5) if num_request else None
            num_request_pairs = self.shared_dot.num_pairs if self.shared_dot is not None else 0
            num_pairs = self.dot.num_pairs + num_candidate * num_request
            self.dot_hidden = SharedLinear(num_pairs, num_request_pairs, widths[0])
            layers = [nn.SiLU(), nn.Dropout(dropout), MLP(hidden[0], hidden[1:], widths[-1], dropout)] if hidden else []
            self.dot_output = nn.Sequential(*layers)
        if self.crosses:
            self.down = SharedLinear(num_candidate * dim, num_request * dim, rank, bias=False)
            self.up = nn.Linear(rank, num_tokens * dim)
        self.num_request = num_request
        self.max_candidates = max_candidates
        self.dim = dim

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate, d] and, if built for them, request [R, num_request, d] with its rows."""
        given = request_part(self.num_request, request, rows, "tokens")
        # Each in three products; in the last sum as it came.
        paired, crossing, weighed = narrowed(candidate, 3)
        request_parts = None if given is None else narrowed(given[0], 3)
        dot = self._dot(paired, crossing, request_parts, rows) if self.dots else None
        sizes = [self.num_request * self.dim, candidate.shape[1] * self.dim]
        of_candidate, of_request = candidate.flatten(1), None if request is None else request.flatten(1)
        if self.crosses:
            of_all = None if request_parts is None else request_parts[2].flatten(1)
            # DCN(X) + X is X * (U V X + b) + X + X: the last two terms are 2 X.
            crossed = self.up(self.down(weighed.flatten(1), of_all, rows)) + 2
            if of_request is None or rows is None:
                mixed = of_candidate * crossed
            else:
                shared, own = crossed.split(sizes, dim=1)
                mixed = torch.cat([rows.multiply(shared, of_request), of_candidate * own], dim=1)
            mixed = mixed if dot is None else mixed + dot
        else:
            assert dot is not None
            if of_request is None or rows is None:
                mixed = of_candidate + dot
            else:
                shared, own = dot.split(sizes, dim=1)
                mixed = torch.cat([rows.add(shared, of_request), of_candidate + own], dim=1)
        return rms_norm(mixed.unflatten(1, (-1, self.dim)))

    def _dot(
        self, paired: Tensor, crossing: Tensor, request: Sequence[Tensor] | None, rows: CandidateRows | None
    ) -> Tensor:
        pairs, of_request = self.dot(paired), None
        if self.shared_dot is not None and request is not None and rows is not None:
            pairs = torch.cat([pairs, self.dot.across(crossing, request[1], rows, self.max_candidates)], dim=1)
            of_request = self.shared_dot(request[0])
        # A lone token of a request has no pairs with itself.
        return self.dot_output(self.dot_hidden(pairs, of_request if self.dot_hidden.shared else None, rows))

"""A model whose body copies requests to candidates, and what holds a rewritten one to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional as F

from modules import ikbo_rewrite
from modules.rewrite import Report

COUNTS = torch.tensor([2, 0, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])
OWNER = torch.tensor([0, 0, 2, 2, 2])
REQUESTS, CANDIDATES = Dim("requests", min=1, max=64), Dim("candidates", min=1, max=4096)
SIZES = {"user": {0: REQUESTS}, "candidate": {0: CANDIDATES}, "offsets": {0: REQUESTS + 1}}


def owner_of(offsets: Tensor, candidate: Tensor) -> Tensor:
    requests = torch.arange(offsets.shape[0] - 1)
    return torch.repeat_interleave(requests, offsets.diff(), output_size=candidate.shape[0])


class Model(nn.Module):
    """A body on (user [R, 4, 8], candidate [C, 3, 8], offsets) with a few parameters to use."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.mix = nn.Linear(7, 5, bias=False)
        self.biased = nn.Linear(7, 5)
        self.flat = nn.Linear(56, 6)
        self.dense = nn.Linear(8, 8)
        self.key_value = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.double()

    def forward(self, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        return self.body(self, user, candidate, offsets)


def inputs(counts: Tensor = COUNTS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    candidates = int(counts.sum())
    user, candidate = torch.randn(len(counts), 4, 8).double(), torch.randn(candidates, 3, 8).double()
    return user.requires_grad_(), candidate.requires_grad_(), F.pad(counts.cumsum(0), (1, 0))


def rewritten(body: Callable[..., Tensor], **options: Any) -> tuple[Model, fx.GraphModule, Report]:
    model = Model(body)
    exported = export(model, inputs(), dynamic_shapes=SIZES)
    return model, *ikbo_rewrite(exported, **options)


def assert_same(model: nn.Module, graph: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Results and every gradient, but for the order of float64 sums."""
    leaves = [x for x in (*example, *model.parameters()) if x.is_floating_point()]
    results = []
    for module in (model, graph):
        out = module(*example)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
        results.append((out, *torch.autograd.grad(out, leaves, cotangent, allow_unused=True)))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def copies(graph: fx.GraphModule) -> list[str]:
    """Operators of a graph that copy rows."""
    names = ("index.Tensor", "index_select", "expand", "repeat")
    called = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    return [name for name in called if name.startswith(names)]


def tokens(user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([user[owner_of(offsets, candidate)], candidate], dim=1)

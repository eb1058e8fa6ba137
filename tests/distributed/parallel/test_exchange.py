"""Experts on several ranks give what they give on one: outputs and every gradient, also on ranks without tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from modules.layers.moe import AllGather, AllToAll, MoE, Router, exchange
from modules.layers.moe.exchange import PAYLOADS
from modules.models.token_mixing import SparseConfig, TokenMixingConfig
from tests.modules.factories import random_batch, random_spec
from tests.modules.models.test_models import TOKEN_MIXING, double, double_model
from tests.processes import run_ranks
from train.config.schema import RuntimeConfig
from train.process import distributed

EXPERTS, DIM = 4, 8
TOKENS: list[tuple[int, dict[str, Any]]] = [
    (5, {"mixing": "revert", "moe": SparseConfig(num_experts=3, top_k=2)}),  # 2 L + 1
    (5, {"mixing": "revert", "one_way": False}),
    (3, {"mixing": "add", "norm": "post", "sequences": "target"}),
    (3, {"mixing": "boost", "layers": [{"feed_forward": "moe"}, {"feed_forward": "swiglu"}]}),
    (2, {"mixing": "none", "layers": [{"feed_forward": "gelu"}, {"mixing": "none"}]}),
]
"""Collectives of a forward."""


def _layer(top_k: int) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, 6, EXPERTS, top_k, num_shared_experts=1).double()


def _same_as_whole(world: distributed.World, counts: tuple[int, ...], top_k: int) -> None:
    whole, layer = _layer(top_k), _layer(top_k)
    held = EXPERTS // world.size
    mine = slice(world.rank * held, (world.rank + 1) * held)
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, torch.nn.Parameter(parameter.detach()[mine].clone()))
    layer.dispatcher = (AllGather if top_k == EXPERTS else AllToAll)(dist.group.WORLD)
    tokens = torch.randn(sum(counts), DIM, dtype=torch.float64).split(counts)
    everyone = torch.cat(tokens).requires_grad_()
    x = tokens[world.rank].clone().requires_grad_()
    expected, y = whole(everyone), layer(x)
    rows = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
    torch.testing.assert_close(y, expected[rows])
    factor = torch.randn(sum(counts), DIM, dtype=torch.float64)
    (expected * factor).sum().backward()
    (y * factor[rows]).sum().backward()
    assert x.grad is not None
    assert everyone.grad is not None
    torch.testing.assert_close(x.grad, everyone.grad[rows])
    for name, parameter in layer.experts.named_parameters():
        gradient = whole.experts.get_parameter(name).grad
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient[mine])
    gate, gradient = layer.router.gate.weight.grad, whole.router.gate.weight.grad
    assert gate is not None
    dist.all_reduce(gate)  # each rank has that of its own tokens
    torch.testing.assert_close(gate, gradient)


def _tokens_that_do_not_go_to_all_experts_are_refused_by_the_form_for_those_that_do() -> None:
    layer = _layer(2)
    layer.dispatcher = AllGather(dist.group.WORLD)
    with pytest.raises(ValueError, match="tokens that go to all 4 experts, got top_k=2; use AllToAll"):
        layer(torch.randn(3, DIM, dtype=torch.float64))


def _rounded(world: distributed.World) -> None:
    """Rows and gradients that travel as MXFP8 are off by at most half a step of e4m3: 2^-4 of a normal number, and
    2^-10 of the scale, which is at most 2^-7 of the largest of 32, of a smaller one."""
    rows = torch.randn(6, 40, dtype=torch.float64) * torch.logspace(-3, 3, 6)[:, None]  # the last block is short
    factor = torch.randn(6, 40, dtype=torch.float64)
    for payload, (forward, backward) in PAYLOADS.items():
        x = rows.clone().requires_grad_()
        y = exchange.exchange_tokens(x, [3, 3], [3, 3], dist.group.WORLD, (forward, backward))
        z = exchange.exchange_tokens(y, [3, 3], [3, 3], dist.group.WORLD)  # and back, exactly
        (z * factor).sum().backward()
        for got, expected, rounded in ((z, rows, forward), (x.grad, factor, backward)):
            bound = expected.abs() * 2**-4 + expected.abs().amax(1, keepdim=True) * 2**-17
            assert ((got - expected).abs() <= bound * rounded).all(), payload
            assert torch.equal(got, expected) is not rounded
    outputs = []
    for payload in ("full", "mxfp8"):
        for kind, layer in ((AllToAll, _layer(2)), (AllGather, _layer(EXPERTS))):
            keep = slice(world.rank * EXPERTS // 2, (world.rank + 1) * EXPERTS // 2)
            for name, parameter in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, torch.nn.Parameter(parameter.detach()[keep].clone()))
            layer.dispatcher, layer.shared = kind(dist.group.WORLD, payload=payload), None
            outputs.append(layer(torch.randn(6, DIM, dtype=torch.float64, generator=torch.manual_seed(world.rank))))
    for exact, rounded in zip(outputs[:2], outputs[2:], strict=True):
        # Two roundings of up to 2^-4, the first one in front of a SwiGLU, which is of second degree.
        assert 0 < (rounded - exact).norm() < 3 * 2**-4 * exact.norm()


def _shared_experts_run_while_tokens_travel() -> None:
    """In the forward and in the backward: between the start of the exchange and the wait for it."""
    events: list[str] = []
    start, finish = exchange._Transfer.start, exchange._Transfer.finish

    def noted(event: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*arguments: Any) -> Tensor:
            events.append(event)
            return function(*arguments)

        return run

    layer = _layer(4)
    layer.dispatcher = AllToAll(dist.group.WORLD)
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, torch.nn.Parameter(parameter.detach().chunk(2)[dist.get_rank()].clone()))
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda *_: events.append("shared"))
    layer.shared.register_full_backward_hook(lambda *_: events.append("shared"))
    patched = {"start": noted("start", start), "finish": noted("finish", finish)}
    with mock.patch.multiple(exchange._Transfer, **patched):
        y = layer(torch.randn(5, DIM, dtype=torch.float64, requires_grad=True))
        forward, events[:] = list(events), []
        y.sum().backward()
    assert forward == ["start", "shared", "finish", "start", "finish"]
    assert events == ["start", "finish", "start", "shared", "finish"]


def _tokens_over_ranks(world: distributed.World, exchanges: int, change: dict[str, Any]) -> None:
    """Each rank has the networks of half of the tokens, and the requests of both."""
    config = TokenMixingConfig(**TOKEN_MIXING | {"feed_forward": "moe", "lower_weight": 0.1, "interval": 1} | change)
    spec, started, start = random_spec(), [], exchange._Transfer.start

    def noted(transfer: exchange._Transfer, rows: Tensor) -> None:
        started.append(len(rows))
        start(transfer, rows)

    whole, model = double_model(config, spec), double_model(config, spec)
    assert model.arch.share_tokens(dist.group.WORLD, "full")
    for layer in model.arch.modules():
        if isinstance(layer, MoE):
            for name, parameter in list(layer.experts.named_parameters()):
                part = parameter.detach().chunk(world.size)[world.rank].clone()
                setattr(layer.experts, name, torch.nn.Parameter(part))
    for candidates in ((2, 0, 3), (1,)), ((0,), (4, 1)):
        batch = double(random_batch(spec, candidates[world.rank % 2], seed=world.rank))
        logits = []
        for each in (whole, model):
            each.zero_grad()
            tokens = each.embedding(batch)
            with mock.patch.object(exchange._Transfer, "start", noted):
                logits.append([each.arch(tokens, batch), *(lower for _, lower in each.arch.take_lower())])
                sum(weight * y.square().sum() for weight, y in enumerate(logits[-1], 1)).backward()
        assert len(started) == 2 * exchanges, "as many back"
        started.clear()
        torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-13)
        for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
            sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in (parameter, expected)]
            dist.all_reduce(sums[1])
            if ".experts." in name:
                sums[1] = sums[1].chunk(world.size)[world.rank]
            else:
                dist.all_reduce(sums[0])
            torch.testing.assert_close(*sums, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        counts = [
            [m.tokens_per_expert.clone() for m in each.modules() if isinstance(m, Router)] for each in (whole, model)
        ]
        for pair in zip(*counts, strict=True):
            for each in pair:
                dist.all_reduce(each)
            assert torch.equal(*pair)


def _cases(ranks: int) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    _tokens_that_do_not_go_to_all_experts_are_refused_by_the_form_for_those_that_do()
    if ranks == 2:
        _rounded(world)
        _shared_experts_run_while_tokens_travel()
    for top_k in (2, EXPERTS):
        for counts in ((5, 3), (0, 7), (0, 0)) if ranks > 1 else ((5,), (0,)):
            _same_as_whole(world, counts, top_k)
    for exchanges, change in TOKENS:
        _tokens_over_ranks(world, exchanges, change)
    distributed.stop()


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_and_gradients_are_those_of_the_whole_layer(ranks: int) -> None:
    run_ranks(_cases, ranks, ranks)

"""Experts on several ranks give what they give on one: outputs and every gradient, also on ranks without tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from modules.moe import AllGather, AllToAll, MoE
from tests.processes import run_ranks
from train.config.schema import RuntimeConfig
from train.process import distributed

EXPERTS, DIM = 4, 8


def _layer(top_k: int) -> MoE:
    torch.manual_seed(0)
    return MoE(DIM, 6, EXPERTS, top_k, num_shared_experts=1).double()


def _same_as_whole(world: distributed.World, counts: tuple[int, ...], top_k: int) -> None:
    whole, layer = _layer(top_k), _layer(top_k)
    held = EXPERTS // world.size
    mine = slice(world.rank * held, (world.rank + 1) * held)
    for name, parameter in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, torch.nn.Parameter(parameter.detach()[mine].clone()))
    dispatcher = AllGather if top_k == EXPERTS else AllToAll
    layer.dispatcher = dispatcher(dist.group.WORLD)
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


def _cases(ranks: int) -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    for top_k in (2, EXPERTS):
        for counts in ((5, 3), (0, 7), (0, 0)) if ranks > 1 else ((5,), (0,)):
            _same_as_whole(world, counts, top_k)
    distributed.stop()


@pytest.mark.parametrize("ranks", [1, 2])
def test_outputs_and_gradients_are_those_of_the_whole_layer(ranks: int) -> None:
    run_ranks(_cases, ranks, ranks)


def test_tokens_that_do_not_go_to_all_experts_are_refused_by_the_form_for_those_that_do() -> None:
    run_ranks(_refused, 1)


def _refused() -> None:
    distributed.start(RuntimeConfig(device="cpu", threads=1))
    layer = _layer(2)
    layer.dispatcher = AllGather(dist.group.WORLD)
    with pytest.raises(ValueError, match="tokens that go to all 4 experts, got top_k=2; use AllToAll"):
        layer(torch.randn(3, DIM, dtype=torch.float64))
    distributed.stop()

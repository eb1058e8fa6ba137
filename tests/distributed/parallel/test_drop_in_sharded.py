"""Drop-in modules in data parallelism, replicated and sharded as a whole, by children and by layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from modules.layers.moe import MoE
from tests.modules.test_drop_in import DIM, MODULES, gradients, setup
from tests.processes import run_ranks


def holders(module: nn.Module) -> list[nn.Module]:
    parts = [part for part in module.modules() if part is not module and list(part.parameters(recurse=False))]
    return parts[::-1]  # inner ones first, as FSDP wants them


PARTS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "whole": lambda module: [],
    "children": lambda module: list(module.children()),
    "layers": holders,
}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_each() -> None:
    dist.init_process_group("gloo")
    for name in MODULES:
        module, inputs = setup(name)
        expected = gradients(module, inputs)
        replica, _ = setup(name)
        torch.testing.assert_close(gradients(DistributedDataParallel(replica), inputs), expected)
        for parts in PARTS.values():
            sharded, _ = setup(name)
            for part in parts(sharded):
                fully_shard(part)
            fully_shard(sharded)
            actual = gradients(sharded, inputs)
            assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
            # Layers that are sharded by themselves multiply by themselves, in another order of sums.
            torch.testing.assert_close([whole(tensor) for tensor in actual], expected, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


def test_replicas_and_shards_have_the_gradients_of_one_process() -> None:
    run_ranks(train_each, 2)


def shard_in_mixed_precision() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    moe, x = MoE(DIM, 32, 4, 2), torch.randn(64, DIM)
    gate = moe.router.gate.weight.detach().clone()
    expected = moe.router(x.bfloat16()).scores
    fully_shard(moe.router)
    fully_shard(moe, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = []
    moe.router.register_forward_hook(lambda module, args, routing: seen.append(routing.scores.detach()))
    y = moe(x)
    assert y.dtype is torch.bfloat16
    assert seen[0].dtype is torch.float32
    assert torch.equal(seen[0], expected)
    assert not torch.equal(gate, gate.bfloat16().float())
    dist.destroy_process_group()


def test_a_router_that_is_sharded_by_itself_keeps_its_precision() -> None:
    run_ranks(shard_in_mixed_precision, 2)

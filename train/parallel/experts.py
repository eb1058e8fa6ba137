"""Expert parallelism: each rank of the mesh's `expert` axis holds an equal part of every layer's experts."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from modules.layers.moe import AllGather, AllToAll, Experts, MoE
from modules.models.token_mixing import TokenMixing
from train.config.schema import ParallelConfig
from train.parallel.mesh import Mesh


def share_experts(model: nn.Module, parallel: ParallelConfig, mesh: Mesh) -> None:
    """Leave this rank its part of the experts of each layer, and let the layers exchange tokens.

    ValueError where there are no experts, or they cannot be shared out evenly.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoE)]
    if not layers:
        raise ValueError(
            f"parallel.expert_ranks={parallel.expert_ranks}: the model has no routed experts (Kunlun's Wukong experts "
            "are not routed, and stay whole); use parallel.expert_ranks=0, or model.feed_forward=moe"
        )
    group, count, payload = mesh.whole.get_group("expert"), mesh.size("expert"), parallel.expert_payload
    by_token = any(isinstance(arch, TokenMixing) and arch.share_tokens(group, payload) for arch in model.modules())
    for name, layer in layers:
        total = layer.router.num_experts
        if total % count:
            of_kind, step = total // layer.router.num_kinds, count // math.gcd(layer.router.num_kinds, count)
            raise ValueError(
                f"parallel.expert_ranks={count} must divide the {total} experts of {name}, e.g. "
                f"model.moe.num_experts={-(-of_kind // step) * step}"
            )
        keep_part(layer.experts, mesh.whole)
        if not by_token:
            sees_all = layer.router.top_k == total
            layer.dispatcher = (AllGather if sees_all else AllToAll)(group, payload)


def keep_part(experts: Experts, mesh: DeviceMesh) -> None:
    """Reduce whole experts to those of this rank along the last axis of `mesh`."""
    index = mesh.get_local_rank(2)
    for name, whole in list(experts.named_parameters()):
        part = whole.detach().chunk(mesh.size(2))[index].clone()
        setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    experts.mesh = mesh


def reduce_gradients(experts: Experts, mesh: DeviceMesh) -> None:
    """Average the gradients of replicated experts over the ranks that hold the same ones, as soon as they are there.

    A gradient is already the sum over the tokens of one group of expert ranks; the mean is over all ranks.
    """
    group, ranks = mesh.get_group("replicate"), mesh.size()

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= ranks
        if group.size() > 1:
            dist.all_reduce(parameter.grad, group=group)

    for parameter in experts.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)

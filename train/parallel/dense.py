"""Data parallelism of the dense part: DDP (`GradientMean` with CUDA graphs), or FSDP2 over the mesh: `parallel.dense`.

FSDP2 shards layer by layer: the layers are the outermost modules below the architecture that have a forward of their
own, gathered when they are called, forward and backward, and for those other methods that their class names in
`gathered_for`; what is left is gathered by the model. A layer is gathered in bfloat16 where autocast would round its
weights anyway, or a recipe to fewer bits, and in float32 where neither would. Gradients are reduced in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.distributed.utils import _sync_module_states
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_unwrapped_module,
)
from torchrec.distributed.types import ShardingEnv

from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.moe import Experts, Router
from modules.models.ranking import RankingModel
from modules.precision import FP32Linear
from train.config.schema import Config
from train.parallel.experts import reduce_gradients
from train.parallel.gradient_mean import GradientMean
from train.parallel.mesh import Mesh
from train.process.distributed import World
from train.speedup.regions import regions


def data_parallel(config: Config, world: World, mesh: Mesh | None) -> DataParallelWrapper:
    """What makes the dense part of a model data-parallel once its tables are sharded."""
    if mesh is not None and mesh.dense is not None:
        half = config.precision.name != "fp32"
        return _FullyShard(mesh, mesh.dense, half=half, compiled=config.runtime.compile)
    graphs = config.runtime.cuda_graphs and world.device.type == "cuda"
    return _Alone() if world.size == 1 else Replicated(together=graphs)


_BUCKET_BYTES = 250 * 2**20


class _Alone(DataParallelWrapper):
    """In place of DDP on a single rank, where DDP would only scale and copy each gradient."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


class Replicated(DataParallelWrapper):
    """DDP for all but the experts that other ranks do not have, or `together` a `GradientMean`."""

    def __init__(self, *, together: bool) -> None:
        self._together = together

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        model = get_unwrapped_module(dmp)
        own = [
            f"{prefix}.{name}"
            for prefix, experts in model.named_modules()
            if isinstance(experts, Experts) and experts.mesh is not None
            for name, _ in experts.named_parameters()
        ]
        for module in model.modules():
            if isinstance(module, Experts) and module.mesh is not None:
                reduce_gradients(module, module.mesh)
        if not self._together:
            DefaultDataParallelWrapper(params_to_ignore=own).wrap(dmp, env, device)
            return
        group = env.process_group
        assert group is not None
        apart = {*own, *DistributedModelParallel._sharded_parameter_names(model)}
        parameters = [parameter for name, parameter in model.named_parameters() if name not in apart]
        _sync_module_states(model, group, _BUCKET_BYTES, 0, apart)  # as DDP does
        dmp.gradient_mean = GradientMean(parameters, group)


class _FullyShard(DataParallelWrapper):
    """FSDP2 over `dense`, [shard] or [replicate, shard]; experts over what is left of the mesh beside theirs."""

    def __init__(self, mesh: Mesh, dense: DeviceMesh, *, half: bool, compiled: bool) -> None:
        self._mesh, self._dense, self._half, self._compiled = mesh, dense, half, compiled

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        model = get_unwrapped_module(dmp)
        assert isinstance(model, RankingModel)
        ignored = set(_tables(model.embedding))
        for module in list(model.arch.modules()):
            if isinstance(module, Experts) and module.mesh is not None:
                if self._mesh.size("shard") > 1:
                    self._shard_experts(module)
                else:
                    ignored.update(module.parameters())
                    reduce_gradients(module, module.mesh)
            elif isinstance(module, Router):
                if self._compiled:
                    raise ValueError(
                        "runtime.compile=true with parallel.dense=fsdp or hsdp: routers are gathered alone, within "
                        "layers that would be compiled; use runtime.compile=false or parallel.dense=ddp"
                    )
                fully_shard(module, mesh=self._dense, reshard_after_forward=True)
        for region in dict.fromkeys(regions(model.arch)):
            if next(region.parameters(), None) is not None and not isinstance(region, FSDPModule):
                policy = self._policy(region)
                fully_shard(
                    region, mesh=self._dense, reshard_after_forward=True, mp_policy=policy, ignored_params=ignored
                )
                for name in getattr(region, "gathered_for", ()):
                    register_fsdp_forward_method(region, name)
        # All are resharded after each forward, so that parameters are the shards whenever anything else looks at them.
        fully_shard(model, mesh=self._dense, reshard_after_forward=True, ignored_params=ignored)
        for module in model.modules():
            if isinstance(module, FSDPModule) and device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average

    def _policy(self, module: nn.Module) -> MixedPrecisionPolicy:
        exact = any(isinstance(part, FP32Linear) for part in module.modules() if not isinstance(part, FSDPModule))
        if not self._half or exact:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def _shard_experts(self, experts: Experts) -> None:
        """By rows of an expert's matrices, since the experts themselves lie along another axis."""
        shards = self._mesh.size("shard")
        for name, parameter in experts.named_parameters():
            if parameter.shape[1] % shards:
                raise ValueError(
                    f"the {parameter.shape[1]} rows of {name} of each expert cannot be split evenly over {shards} "
                    f"ranks of parallel.dense; make model.dim and model.moe.expert_dim multiples of {shards}"
                )
        fully_shard(
            experts,
            mesh=self._mesh.of_experts,
            reshard_after_forward=True,
            shard_placement_fn=lambda parameter: Shard(1),
            mp_policy=self._policy(experts),
        )
        assert isinstance(experts, FSDPModule)
        # Each rank's gradients are those of the tokens of all expert ranks, and the mean is over all ranks.
        experts.set_gradient_divide_factor(self._mesh.whole.size())


def _tables(embedding: FeatureEmbedding) -> Iterator[nn.Parameter]:
    """Parameters below TorchRec's collections, whose own list holds only some of them."""
    for collection in embedding.collections:
        for part in cast(nn.Module, collection).modules():
            yield from (parameter for _, parameter in part.named_parameters(recurse=False))

"""Does a configuration fit into memory? Bytes of a rank, computed before anything is allocated on a device.

Tables come from the sharding plan, the dense part from its parameters and the layout of the ranks, activations from a
forward of a few requests on the CPU, of which everything that the backward reads is counted and scaled to a batch.
Kernels count with their arguments and results, as they recompute the rest. What a CUDA context, NCCL, the allocator's
gaps and the workspace of products take is not counted: expect a tenth more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import JaggedTensor

from kernels.core import dispatch
from modules.batch import FeatureSpec
from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
from modules.layers.moe import Experts
from modules.models import build as build_arch
from modules.models.ranking import RankingModel
from modules.precision import apply_recipe
from train.build import planned
from train.config.schema import Config
from train.data.source import Source
from train.optim.frozen import freeze
from train.optim.sparse import GIB, ids_per_request, plan_tables, sharders_of
from train.parallel.mesh import sizes, table_ranks
from train.parallel.recompute import Recomputed, recompute
from train.process.distributed import World
from train.speedup.regions import regions

SAMPLE = 32  # requests of the forward from which activations are scaled
SAMPLED_EVENTS = 16_384  # that they have together, about: the forward runs in host memory
STATE = {"rowwise_adagrad": lambda columns: 4, "adam": lambda columns: 8 * columns, "sgd": lambda columns: 0}
"""Bytes of optimiser state of a row of a shard."""


@dataclass(frozen=True)
class Change:
    setting: str
    saved: int  # bytes of a rank


@dataclass(frozen=True)
class Fit:
    """Bytes of the rank that needs most."""

    parts: dict[str, int]
    memory: int  # of a GPU
    note: str  # about the plan of the tables
    changes: list[Change]  # that save most, first
    ids: int  # that a rank's batch looks up
    unique_ids: int  # the same, each once for a table

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.memory

    def report(self) -> str:
        """A line for each part, the verdict and, if it does not fit, three settings to change."""
        lines = [f"{name:34}{size / GIB:10.3f} GiB" for name, size in {**self.parts, "together": self.total}.items()]
        lines.append(f"{'memory of a GPU':34}{self.memory / GIB:10.3f} GiB")
        lines += [self.note] if self.note else []
        unique = f"{self.unique_ids:,} different ones, which are what parallel.index_dedup=true sends"
        lines.append(f"ids that a rank looks up in a batch: {self.ids:,}, {unique}")
        if self.fits:
            return "\n".join([*lines, f"fits, with {(self.memory - self.total) / GIB:.3f} GiB left"])
        lines.append(f"does not fit: {(self.total - self.memory) / GIB:.3f} GiB too much. What saves most on a rank:")
        lines += [f"  {change.saved / GIB:8.3f} GiB  {change.setting}" for change in self.changes[:3]]
        return "\n".join(lines)


class _Planning(World):
    """A world of ranks that do not exist."""

    def by_first(self, make: Callable[[], Any]) -> Any:
        return make()


def fit(config: Config, ranks: int, node_ranks: int, gpu_gib: float) -> Fit:
    """What this configuration takes on each of `ranks` GPUs of `gpu_gib`, `node_ranks` of them on a node."""
    if config.precision.name == "auto":
        config.precision.name = "bf16"  # as GPUs have it
    source, _, spec, _ = planned(config, ranks)
    model = _model(config, source, spec)
    tables, note = _tables(config, source, model, ranks, node_ranks, gpu_gib)
    dense = _dense(config, model, ranks, node_ranks)
    activations = _activations(config, source, model)
    parts = {**tables, **dense, "activations and looked-up rows": activations}
    changes = _changes(config, source, model, parts, ranks, node_ranks)
    return Fit(
        parts, int(gpu_gib * GIB), note, sorted(changes, key=lambda change: -change.saved), *_ids(config, source)
    )


def _ids(config: Config, source: Source) -> tuple[int, int]:
    """Ids that a rank's batch looks up, and how many are different ones of their tables."""
    requests = np.linspace(0, source.num_requests("train") - 1, config.data.batch_size).astype(np.int64)
    lookup = source.batch("train", np.unique(requests)).lookup
    of_tables: dict[str, list[Tensor]] = {}
    for feature, table in source.spec.lookups():
        of_tables.setdefault(table, []).append(lookup[feature].values())
    return lookup.values().numel(), sum(torch.cat(ids).unique().numel() for ids in of_tables.values())


def _model(config: Config, source: Source, spec: FeatureSpec) -> RankingModel:
    """The model in host memory, its tables on `meta`."""
    torch.manual_seed(config.runtime.seed)
    embedding = FeatureEmbedding.of(source.spec, config.model, "meta")
    model = RankingModel(embedding, build_arch(config.model, spec))
    # What is quantised matters to memory, and Hopper is where `auto` quantises anything.
    apply_recipe(model, config.precision.name, config.precision.quantize, capability=(9, 0))
    freeze(model, config.optimizer.frozen)
    return model


def _tables(
    config: Config, source: Source, model: RankingModel, ranks: int, node_ranks: int, gpu_gib: float
) -> tuple[dict[str, int], str]:
    """Bytes of weights and of optimiser state in GPU memory, of the rank that holds most."""
    none: Any = None
    world = _Planning(0, ranks, 0, min(node_ranks, ranks), torch.device("cuda"), none, none, none)
    planned, share = copy.deepcopy(config), table_ranks(config.parallel, ranks)
    planned.parallel.hbm_gib = planned.parallel.hbm_gib or gpu_gib
    try:
        plan = plan_tables(model, sharders_of(planned, world), planned, world, ids_per_request(source))
    except ValueError as error:
        whole = sum(table.numel() * 4 for each in model.embedding.collections for table in each.parameters())
        rows = sum(
            table.shape[0] * STATE[config.optimizer.sparse](table.shape[1])
            for each in model.embedding.collections
            for table in each.parameters()
        )
        return {"tables": whole // share, "optimiser of tables": rows // share}, f"tables cannot be planned: {error}"
    weights, vectors, state, host = _bytes_of_plan(plan, config, model, share)
    most = int(np.argmax(weights + vectors + state))
    note = f"tables in host memory: {host.max() / GIB:.3f} GiB of a rank" if host.any() else ""
    parts = {"tables": int(weights[most]), "optimiser of tables": int(state[most])}
    return parts | ({"vectors from files": int(vectors[most])} if source.spec.vector_tables else {}), note


def _bytes_of_plan(
    plan: ShardingPlan, config: Config, model: RankingModel, ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of each rank [ranks]: learned rows, those that files give and state in GPU memory, all in host memory."""
    weights, vectors, state, host = np.zeros((4, ranks))
    given = model.embedding.assemble.spec.vector_tables
    parameters = {name.split(".")[-2]: each for name, each in model.named_parameters() if ".embeddings." in name}
    for collection in plan.plan.values():
        for name, table in collection.items():
            parameter, rows_of = parameters[name], vectors if name in given else weights
            for shard in table.sharding_spec.shards if table.sharding_spec is not None else ():
                rank, (rows, columns) = shard.placement.rank(), shard.shard_sizes
                own = rows * columns * parameter.element_size()
                moments = rows * STATE[config.optimizer.sparse](columns) if parameter.requires_grad else 0
                share = 1.0
                if table.compute_kernel.startswith("fused_uvm"):
                    cached = table.compute_kernel == "fused_uvm_caching"
                    factor = table.cache_params.load_factor if table.cache_params is not None else None
                    share = (0.2 if factor is None else factor) if cached else 0.0  # FBGEMM's own share is 0.2
                    host[rank] += own + moments
                rows_of[rank] += own * share
                state[rank] += moments * share
    return weights, vectors, state, host


def _dense(config: Config, model: RankingModel, ranks: int, node_ranks: int) -> dict[str, int]:
    """Bytes of the dense part: what lies there between steps, and what a step adds."""
    _, shard, experts = sizes(config.parallel, ranks, node_ranks) if ranks > 1 else (1, 1, 1)
    of_experts = {p for each in model.arch.modules() if isinstance(each, Experts) for p in each.parameters()}
    sharded = config.parallel.dense != "ddp" and ranks > 1

    def held(parameter: nn.Parameter) -> int:
        by = experts if parameter in of_experts else experts if sharded else 1
        return parameter.numel() * 4 // (by * shard)

    parameters = [*model.arch.parameters(), *model.embedding.assemble.parameters()]
    learning = sum(held(p) for p in parameters if p.requires_grad)
    optimizer = config.optimizer
    half = config.precision.name != "fp32"
    result = {
        "dense weights": sum(held(p) for p in parameters),
        "dense gradients": learning,
        "dense optimiser": 2 * learning,
    }
    if optimizer.ema_decay:
        result["averaged weights"] = learning
    if optimizer.accumulate > 1:
        result["sums of an accumulation"] = learning
    if sharded:
        layers = [sum(p.numel() for p in layer.parameters() if p not in of_experts) for layer in regions(model.arch)]
        # The layer that runs and the one that is gathered ahead, and the gradients of one before they are reduced.
        result["gathered layers"] = sum(sorted(layers)[-2:]) * (2 if half else 4) + max(layers, default=0) * 4
    elif half:
        result["weights rounded by autocast"] = sum(held(p) for p in parameters) // 2
    return result


def _activations(config: Config, source: Source, model: RankingModel) -> int:
    """Bytes that a forward of a batch keeps for its backward, with the looked-up rows and their gradients."""
    last = source.num_requests("train") - 1
    if last < 0:
        return 0
    batch = source.batch("train", np.unique(np.linspace(0, last, SAMPLE).astype(np.int64)))
    events = batch.history_times.values().numel() // batch.num_requests
    fewer = max(1, min(SAMPLE, SAMPLED_EVENTS // max(1, events)))
    requests = np.unique(np.linspace(0, last, fewer).astype(np.int64))
    if fewer < SAMPLE:
        batch = source.batch("train", requests)
    widths: dict[str, int] = {}
    for collection in model.embedding.collections:
        for table in collection.embedding_configs():
            widths |= dict.fromkeys(table.feature_names, table.embedding_dim)
    lookup = batch.lookup
    row_dtype = torch.bfloat16 if config.parallel.row_precision == "bf16" else torch.float32
    embedded = {
        key: JaggedTensor(
            torch.randn(count, widths[key], dtype=row_dtype, requires_grad=True), lengths=torch.tensor([count])
        )
        for key, count in zip(lookup.keys(), lookup.length_per_key(), strict=True)
    }
    rows = sum(each.values().nbytes for each in embedded.values())
    # Sums that lie in memory of their own belong to layers, not to the batch.
    model = copy.deepcopy(model).train()
    recompute(model, config.parallel.recompute, compiled=False)
    counter = _Counter({p.untyped_storage().data_ptr() for p in model.arch.parameters()})
    dtype = torch.float32 if config.precision.name == "fp32" else torch.bfloat16
    with counter.counting(model.arch), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        tokens: Tokens = model.embedding.assemble(embedded, batch)
        model.arch(tokens, batch)
    return int((counter.total + 2 * rows) * config.data.batch_size / len(requests))


class _Counter:
    """Bytes that are kept for a backward, each storage once."""

    def __init__(self, without: set[int]) -> None:
        self._without = without
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._extra = 0
        self._inside = 0  # modules that will run again, of which only the arguments are kept

    @property
    def total(self) -> int:
        return self._extra + sum(storage.nbytes() for storage in self._kept.values())

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._without:
            self._kept[storage.data_ptr()] = storage  # kept alive, so that no other one gets its address
        return tensor

    @contextmanager
    def counting(self, arch: nn.Module) -> Iterator[None]:
        choose = dispatch.choose_backend
        again = [each for each in arch.modules() if isinstance(each.forward, Recomputed)]
        hooks = [each.register_forward_pre_hook(self._enter) for each in again]
        hooks += [each.register_forward_hook(self._leave) for each in again]

        def chosen(op: str, *arguments: Any, **facts: Any) -> dispatch.Backend:
            backend = choose(op, *arguments, **facts)
            return replace(backend, implementation=self._as_operator(op, backend.function))

        saved = torch.autograd.graph.saved_tensors_hooks(self.keep, _as_is)
        with saved, mock.patch.object(dispatch, "choose_backend", chosen):
            yield
        for hook in hooks:
            hook.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._keep_all(inputs)
        self._inside += 1

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        self._inside -= 1

    def _keep_all(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor):
                self.keep(tensor)

    def _as_operator(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel keeps its arguments and results; that of experts also what their first product gave."""

        def run(*arguments: Any, **named: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is):
                result = function(*arguments, **named)
            if self._inside:
                return result
            self._keep_all((arguments, named, result))
            if op == "moe_experts":
                _, selected, _, gate_up, *_ = arguments
                self._extra += selected.numel() * gate_up.shape[1] * 2
            return result

        return run


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def _changes(
    config: Config, source: Source, model: RankingModel, parts: dict[str, int], ranks: int, node_ranks: int
) -> Iterator[Change]:
    """Settings that would save memory, and how much."""
    parallel, activations = config.parallel, parts["activations and looked-up rows"]
    dense = sum(size for name, size in parts.items() if "dense" in name)
    if config.data.batch_size > 1:
        half = config.data.batch_size // 2
        yield Change(f"data.batch_size={half}", activations * (config.data.batch_size - half) // config.data.batch_size)
    if not parallel.recompute and any(True for _ in regions(model.arch)):
        changed = copy.deepcopy(config)
        changed.parallel.recompute = ["arch.*"]
        yield Change("parallel.recompute=[arch.*]", activations - _activations(changed, source, model))
    if parallel.dense == "ddp" and ranks > 1:
        changed = copy.deepcopy(config)
        changed.parallel.dense = "fsdp"
        sharded = _dense(changed, model, ranks, node_ranks)
        before = sum(_dense(config, model, ranks, node_ranks).values())
        yield Change("parallel.dense=fsdp", before - sum(sharded.values()))
    if ranks == 1 and dense > parts["tables"]:
        yield Change("two ranks with parallel.dense=fsdp", dense // 2)
    if config.optimizer.sparse == "adam":
        yield Change("optimizer.sparse=rowwise_adagrad", parts["optimiser of tables"])
    tables = {table.name: table for each in model.embedding.collections for table in each.embedding_configs()}
    largest = max(tables.values(), key=lambda table: table.num_embeddings * table.embedding_dim)
    own, of_tables = (
        largest.num_embeddings * largest.embedding_dim * 4 // ranks,
        parts["tables"] + parts["optimiser of tables"],
    )
    if (share := table_ranks(parallel, ranks)) < ranks:
        yield Change("parallel.table_ranks=0", of_tables - of_tables * share // ranks)
    elif not any(rule.kernels for rule in parallel.tables):
        rule = f"{{match: [{largest.name}], kernels: [fused_uvm_caching], cache_share: 0.1}}"
        yield Change(f"parallel.tables=[{rule}]", own * 9 // 10)
    if share == ranks:
        yield Change(f"{2 * ranks} ranks", of_tables // 2)

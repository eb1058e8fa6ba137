"""One training step over ranks: the poisoned batch, the sharded tables, the loss over unequal ranks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from modules.batch import FeatureSpec, RequestBatch
from modules.config import ManagedTable
from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
from modules.loss import ranking_loss
from modules.models.baselines import DLRM
from modules.models.ranking import RankingModel
from tests.modules.factories import random_batch, random_spec
from tests.processes import run_ranks
from train.config.schema import (
    CheckpointConfig,
    Config,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
    SyntheticConfig,
    TablesConfig,
    TrackingConfig,
)
from train.optim.dense import Optimizer
from train.optim.guards import FiniteGuard
from train.optim.sparse import shard
from train.parallel.copies import TableCopies
from train.parallel.mesh import table_mesh
from train.process import distributed

DIM = 8
POISONED = 2  # the step whose batch has a NaN on rank 0


class MeanArch(nn.Module):
    """The smallest architecture that uses every token."""

    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        width = DIM * sum(len(event.fields) for event in spec.histories)
        self.tokens = nn.Linear(DIM, len(spec.tasks))
        self.events = nn.Linear(width, len(spec.tasks))

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        events = torch.cat([history.values.sum(0, keepdim=True) for history in tokens.histories.values()], dim=1)
        features = tokens.candidate.mean(1) + tokens.request.mean(1)[batch.owner]
        return self.tokens(features) + self.events(events)


class Step:
    """Model, guard, optimiser and pipeline as the trainer wires them."""

    def __init__(
        self,
        optimizer: OptimizerConfig,
        row_precision: str = "fp32",
        whole: tuple[str, ...] = (),
        *,
        index_dedup: bool = False,
        table_ranks: int = 0,
        managed: dict[str, ManagedTable] | None = None,
        sharding: str = "row_wise",
    ) -> None:
        self.world = distributed.start(RuntimeConfig(device="cpu", threads=1))
        self.spec = random_spec()
        config = Config(
            model=DLRM.Config(dim=DIM, managed_tables=managed or {}),
            data=SyntheticConfig(batch_size=6),
            precision=PrecisionConfig(name="fp32"),
            optimizer=optimizer,
            parallel=ParallelConfig(
                sharding_types=[sharding],
                row_precision=row_precision,
                index_dedup=index_dedup,
                table_ranks=table_ranks,
                tables=[TablesConfig(match=[name], sharding_types=["data_parallel"]) for name in whole],
            ),
            checkpoint=CheckpointConfig(),
            tracking=TrackingConfig(),
            runtime=RuntimeConfig(),
        )
        torch.manual_seed(0)
        model = RankingModel(FeatureEmbedding(self.spec, DIM, managed_tables=managed), MeanArch(self.spec))
        self.embedding = model.embedding
        mesh = table_mesh(config.parallel, self.world, 60.0)
        ids = {name: 1.0 for name, _ in self.spec.lookups()}
        self.model, _ = shard(model, config, self.world, ids, copies=mesh)
        self.copies = None if mesh is None else TableCopies(self.model, mesh, frozen=())
        self.guard = FiniteGuard(model.embedding.assemble, self.world, window=100, locate=lambda row: f"row {row}")
        self.optimizer = Optimizer(self.model, optimizer, 100, self.guard)
        self.pipeline = TrainPipelineSparseDist(
            self.model,
            self.optimizer,
            self.world.device,
            custom_model_fwd=self._forward,  # type: ignore[arg-type]
        )

    def _forward(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        loss, self.optimizer.count = ranking_loss(self.model(batch), batch.labels, batch.weights)
        self.optimizer.rows = batch.row
        return loss, loss.detach()

    def shards(self) -> dict[str, Tensor]:
        state = {name: value for name, value in self.model.state_dict().items() if "embeddings" in name}
        held = {name: [shard.tensor.clone() for shard in value.local_shards()] for name, value in state.items()}
        return {name: torch.cat(parts) for name, parts in held.items() if parts}

    def dense(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.optimizer.params.items()}


def _poisoned_batch(sparse: str) -> None:
    step = Step(OptimizerConfig(sparse=sparse, warmup_steps=0))
    rank = step.world.rank
    batches = [random_batch(step.spec, seed=10 * rank + index) for index in range(5)]
    if rank == 0:
        batches[POISONED].candidate_dense[0, 0] = float("nan")
    iterator = iter(batches)
    for index in range(5):
        shards, dense = step.shards(), step.dense()
        step.pipeline.progress(iterator)
        changed = any(not torch.equal(value, shards[name]) for name, value in step.shards().items())
        dense_changed = any(not torch.equal(value, dense[name]) for name, value in step.dense().items())
        assert changed == dense_changed == (index != POISONED), f"step {index} on rank {rank}"
    assert all(value.isfinite().all() for value in (*step.shards().values(), *step.dense().values()))
    (line,) = step.guard.report()
    assert line.startswith(f"step {POISONED + 1}: non-finite")
    assert "rank 0, row 0 to row 6" in line
    distributed.stop()


@pytest.mark.parametrize("sparse", ["rowwise_adagrad", "sgd"])
@pytest.mark.reliability(
    "a NaN in one rank's batch",
    "no weight or table row changes on any rank; the log names rank, file and rows",
)
def test_a_poisoned_batch_changes_nothing_on_any_rank_and_is_named(sparse: str) -> None:
    run_ranks(_poisoned_batch, 2, sparse)


def _shards_are_partial() -> None:
    step = Step(OptimizerConfig())
    for name, rows in step.spec.tables.items():
        held = next(value for key, value in step.shards().items() if f".{name}." in key)
        assert held.shape[0] == -(-rows // 2) or held.shape[0] == rows // 2
        assert not torch.equal(held, torch.zeros_like(held))


def _data_parallel_table() -> None:
    step = Step(OptimizerConfig(warmup_steps=0, weight_decay=0.1), whole=("user",))
    (name,) = (name for name in step.dense() if "embeddings" in name)
    assert name == "embedding.collection.embeddings.user.weight"
    before = step.dense()[name]
    step.pipeline.progress(iter([random_batch(step.spec, seed=step.world.rank)]))
    after = step.dense()[name]
    both = [torch.empty_like(after) for _ in range(2)]
    dist.all_gather(both, after)
    assert torch.equal(both[0], both[1])
    users = random_batch(step.spec, seed=0).request_sparse, random_batch(step.spec, seed=1).request_sparse
    seen = torch.cat([sparse["user"].values() for sparse in users]).unique()
    changed = set((after != before).any(1).nonzero().squeeze(1).tolist())
    assert changed  # a request without candidates changes nothing, and unseen rows do not decay
    assert changed <= set(seen.tolist())


def _whole_tables_look_up_as_others() -> None:
    """Several of them, with lists and histories, as shards of the same weights do."""
    batch = random_batch(random_spec(), seed=dist.get_rank())
    sharded, whole = Step(OptimizerConfig()), Step(OptimizerConfig(), whole=("user", "item", "tag"))
    weights = whole.dense()
    for name, parameter in sharded.model.state_dict().items():
        for part in parameter.local_shards() if "embeddings" in name else ():
            begin = part.metadata.shard_offsets[0]
            part.tensor.copy_(weights[name][begin : begin + part.tensor.shape[0]])
    expected, actual = (step.embedding.collection(batch.lookup) for step in (sharded, whole))
    for name, rows in expected.items():
        assert torch.equal(actual[name].values(), rows.values()), name
    sum(rows.values().square().sum() for rows in actual.values()).backward()
    seen = batch.lookup["event0.item"].values()
    (gradient,) = (p.grad for name, p in whole.optimizer.params.items() if ".item." in name)
    assert gradient is not None
    assert gradient[seen].any(1).all()


def _rows_in_bfloat16() -> None:
    changes = []
    for precision in ("fp32", "bf16"):
        step = Step(OptimizerConfig(sparse="sgd", warmup_steps=0), precision)
        before = step.shards()
        step.pipeline.progress(iter([random_batch(step.spec, seed=step.world.rank)]))
        changes.append({name: value - before[name] for name, value in step.shards().items()})
    for exact, rounded in zip(*(change.values() for change in changes), strict=True):
        # Rows and gradients are rounded once each, by up to 2^-9 of themselves.
        assert 0 < (rounded - exact).norm() < 2**-7 * exact.norm()


def _each_id_once(is_managed: bool = False) -> None:
    """Which ids have which rows is the same to the bit, as each is counted as often as it occurred.

    In steps of several sizes, of which one rank has no candidate once.
    """
    ids: list[int] = []
    shards: list[dict[str, Tensor]] = []

    def sent(*given: Tensor, **named: Any) -> Any:
        rows = named["input"] if "input" in named else given[1]
        ids[-1] += rows.numel() * (rows.dtype is torch.int64)
        return exchange(*given, **named)

    results, exchange = [], dist.all_to_all_single
    managed = {"item": ManagedTable(rows=8, min_count=2, every=2), "tag": ManagedTable(rows=4, every=2)}
    optimizer = OptimizerConfig(warmup_steps=0, sparse="sgd" if is_managed else "rowwise_adagrad")
    for index_dedup in (False, True):
        step = Step(optimizer, index_dedup=index_dedup, managed=managed if is_managed else None)
        rank = step.world.rank
        sizes = [(2, 0, 1, 3, 1), (1, 2)[: 2 - rank], (0,) * rank + (4,) * (1 - rank), (3, 1), (1,) * (1 + 3 * rank)]
        batches = iter([random_batch(step.spec, size, seed=10 * rank + index) for index, size in enumerate(sizes)])
        ids.append(0)
        with mock.patch("torch.distributed.all_to_all_single", sent):
            for _ in range(5):
                step.pipeline.progress(batches)
        owners = {name: value for name, value in step.model.state_dict().items() if "._mch_" in name}
        assert len(owners) == (8 if is_managed else 0)  # ids, rows, counts and times of two tables
        results.append(step.shards() | step.dense())
        shards.append({name: value.local_shards()[0].tensor.clone() for name, value in owners.items()})
    assert all(torch.equal(shards[1][name], value) for name, value in shards[0].items())
    for name, value in results[0].items():  # gradients of an id that occurs twice are added in another order
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7)
    assert ids[1] < ids[0]


def _tables() -> None:
    for check in (
        _shards_are_partial,
        _data_parallel_table,
        _whole_tables_look_up_as_others,
        _rows_in_bfloat16,
        _each_id_once,
        partial(_each_id_once, is_managed=True),
    ):
        check()
    distributed.stop()


def test_tables_on_two_ranks() -> None:
    run_ranks(_tables, 2)


def _accumulation() -> None:
    """Two micro-batches to one dense step give the gradient of both together."""
    batches = [random_batch(random_spec(), seed=index) for index in range(2)]
    config = {"sparse": "sgd", "sparse_lr": 0.0, "warmup_steps": 0, "clip_norm": 0.0}
    twice = Step(OptimizerConfig(**config, accumulate=2))
    for batch in batches:
        twice.pipeline.progress(iter([batch]))
    accumulated = twice.optimizer.state_dict()
    once = Step(OptimizerConfig(**config))
    total_weight, total = torch.zeros(()), {name: torch.zeros_like(value) for name, value in once.dense().items()}
    for batch in batches:
        once.optimizer.zero_grad()
        loss, weight = ranking_loss(once.model(batch), batch.labels, batch.weights)
        loss.backward()
        total_weight += weight
        for name, param in once.optimizer.params.items():
            assert param.grad is not None
            total[name] += weight * param.grad
    for name, param in once.optimizer.params.items():
        param.grad = total[name] / total_weight
    once.optimizer.step()
    for name, state in once.optimizer.state_dict().items():
        # The first moment is a tenth of the gradient (the parameter's first step would hide its size); sums of a few
        # float32 values in another order.
        torch.testing.assert_close(state["exp_avg"], accumulated[name]["exp_avg"], rtol=1e-5, atol=1e-7)
    distributed.stop()


def test_accumulation_averages_over_candidates() -> None:
    run_ranks(_accumulation, 1)


def _poisoned_micro_batch(where: int) -> None:
    """The bad micro-batch of a pair is left out: the dense step is that of the good one alone."""
    batches = [random_batch(random_spec(), seed=index) for index in range(3)]
    config = {"sparse": "sgd", "sparse_lr": 0.0, "warmup_steps": 0, "clip_norm": 0.0}
    once = Step(OptimizerConfig(**config))
    once.pipeline.progress(iter([batches[0]]))
    expected = once.optimizer.state_dict()
    step = Step(OptimizerConfig(**config, accumulate=2))
    bad = random_batch(step.spec, seed=7)
    bad.candidate_dense[0, 0] = float("nan")
    pair = [batches[0], bad] if where else [bad, batches[0]]
    verdicts = []
    iterator = iter([*pair, *batches[1:]])
    for index in range(4):
        step.pipeline.progress(iterator)
        verdicts.append(step.guard.found_inf.item())
        if index == 1:
            for name, state in step.optimizer.state_dict().items():
                if name != "accumulated":
                    torch.testing.assert_close(state["exp_avg"], expected[name]["exp_avg"], rtol=1e-5, atol=1e-7)
    assert verdicts == [float(index == where) for index in range(4)]
    (line,) = step.guard.report()
    assert line.startswith(f"step {where + 1}: non-finite")
    assert "rank 0, row 0 to row 6" in line
    distributed.stop()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.reliability("a NaN in one of two accumulated batches", "the dense step is the good batch's")
def test_a_poisoned_micro_batch_is_left_out_of_an_accumulated_step(where: int) -> None:
    run_ranks(_poisoned_micro_batch, 1, where)


def _uneven_loss() -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 2, (10, 2), generator=generator).double()
    labels[3, 1] = float("nan")
    weights = torch.rand(10, 2, generator=generator, dtype=torch.float64)
    mine = slice(0, 7) if world.rank == 0 else slice(7, 10)
    loss, _ = ranking_loss(logits[mine], labels[mine], weights[mine])
    dist.all_reduce(loss)
    observed = ~labels.isnan()
    weight = torch.where(observed, weights, 0)
    raw = nn.functional.binary_cross_entropy_with_logits(
        logits, torch.where(observed, labels, 0), weight, reduction="none"
    )
    expected = (raw.sum(0) / weight.sum(0)).mean()
    torch.testing.assert_close(loss / world.size, expected, rtol=1e-6, atol=0)  # the loss is taken in float32
    distributed.stop()


def test_loss_is_the_mean_over_all_ranks_candidates() -> None:
    run_ranks(_uneven_loss, 2)

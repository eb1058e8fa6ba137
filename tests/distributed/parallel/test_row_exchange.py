"""Rows and gradients that ranks exchange are those of TorchRec's own exchange, to the bit."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from tests.distributed.test_step import Step
from tests.modules.factories import random_batch
from tests.processes import run_ranks
from train.config.schema import OptimizerConfig
from train.optim import guards
from train.parallel.exchange import RowExchange
from train.process import distributed


def _trained(sharding: str, candidates: tuple[tuple[int, ...], ...]) -> tuple[Step, dict[str, torch.Tensor]]:
    """After three steps of batches with these numbers of candidates on each rank."""
    step = Step(OptimizerConfig(warmup_steps=0), sharding=sharding)
    seeds = [10 * step.world.rank + index for index in range(3)]
    batches = iter([random_batch(step.spec, candidates[step.world.rank], seed=seed) for seed in seeds])
    for _ in range(3):
        step.pipeline.progress(batches)
    return step, step.shards() | step.dense()


def _as_torchrec_does(sharding: str, candidates: tuple[tuple[int, ...], ...]) -> None:
    with mock.patch("train.optim.sparse.exchange_rows"):
        _, expected = _trained(sharding, candidates)
    wholes = []

    def seen(rows: list[torch.Tensor]) -> list[tuple[torch.Tensor, list[int]]]:
        wholes.append(found := guards_wholes(rows))
        return found

    guards_wholes = guards._wholes
    with mock.patch.object(guards, "_wholes", seen):
        step, found = _trained(sharding, candidates)
    (collection,) = (each for each in step.model.modules() if isinstance(each, ShardedEmbeddingCollection))
    assert [type(output._dist) for output in collection._output_dists] == [RowExchange]
    assert all(len(each) == 1 for each in wholes)  # gradients of all features are brought together in one pass
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    step.pipeline.detach()
    assert step.embedding.collection is not None
    with torch.no_grad():
        rows = step.embedding.collection(random_batch(step.spec, seed=dist.get_rank()).lookup)
    assert all(each.values().isfinite().all() for each in rows.values())
    distributed.stop()


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("candidates", [((2, 0, 1), (1, 1, 1)), ((2, 0, 1, 3), (1,), (0, 0))])
def test_rows_and_gradients_are_those_of_torchrec(sharding: str, candidates: tuple[tuple[int, ...], ...]) -> None:
    run_ranks(_as_torchrec_does, len(candidates), sharding, candidates)

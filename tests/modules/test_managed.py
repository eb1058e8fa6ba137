"""Tables whose rows go to the ids that occur: which ids have a row, and whose it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor

from modules.batch import UNKNOWN_ID
from modules.config import ManagedTable
from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.managed import RowsOfIds, managed_collection
from modules.layers.embedding.managed_local import NO_ID, OF_TRAINING, LocalRowsOfIds
from modules.layers.embedding.tokens import FeatureEmbedding
from tests.modules.factories import random_batch, random_spec
from tests.serving.test_pretrained import tensors

IDS = 2**31 - 1
ROWS, HOT = 40, 24


def rows_of_ids(settings: ManagedTable) -> RowsOfIds:
    table = EmbeddingConfig(settings.rows, 4, name="item", feature_names=["item"])
    collection = managed_collection([table], {"item": settings}, {"item": IDS}, "cpu")
    module = collection._managed_collision_collection._managed_collision_modules["item"]
    assert isinstance(module, RowsOfIds)
    return module


def step(module: RowsOfIds, ids: Tensor) -> Tensor:
    """Rows of a batch of ids, which count if the module is in training."""
    return module({"item": JaggedTensor(ids, lengths=torch.tensor([len(ids)]))})["item"].values()


def shared(rows: Tensor) -> int:
    """How many ids have a row that another one has, too."""
    _, counts = rows.unique(return_counts=True)
    return int(counts[counts > 1].sum())


def drift() -> tuple[list[int], list[int]]:
    """How many hot ids share a row, managed and hashed, at the ends of times in which a third of them changes."""
    generator = torch.Generator().manual_seed(0)
    module = rows_of_ids(ManagedTable(rows=ROWS, min_count=4, every=2))
    managed, hashed = [], []
    hot = torch.randint(1, IDS, (HOT,), generator=generator)
    for _ in range(6):
        hot = torch.cat([hot[HOT // 3 :], torch.randint(1, IDS, (HOT // 3,), generator=generator)])
        for _ in range(8):
            once = torch.randint(1, IDS, (100,), generator=generator)
            step(module, torch.cat([hot.repeat(5), once]))
        module.eval()
        managed.append(shared(step(module, hot)))
        assert (step(module, once) == ROWS - 1).all()  # the row of all ids without one
        module.train()
        hashed.append(shared((hot - 1) % (ROWS - 1) + UNKNOWN_ID + 1))
    return managed, hashed


def test_hot_ids_that_drift_keep_rows_of_their_own_where_hashed_ones_share() -> None:
    managed, hashed = drift()
    assert managed == [0] * 6
    assert min(hashed) > 2


def test_an_id_gets_a_row_once_it_has_occurred_often_enough_and_loses_it_to_a_better_one() -> None:
    module = rows_of_ids(ManagedTable(rows=3, min_count=2, every=1))  # two rows, and that of all others
    step(module, torch.tensor([7, 7, 8]))
    assert module.open_slots().item() == 1
    step(module, torch.tensor([8, 8]))
    owners = {7: int(step(module, torch.tensor([7]))), 8: int(step(module, torch.tensor([8])))}
    assert sorted(owners.values()) == [0, 1]
    assert module.evict() is not None
    for _ in range(4):
        step(module, torch.tensor([8, 8, 9, 9, 9]))
    module.eval()
    assert step(module, torch.tensor([7, 8, 9])).tolist() == [2, owners[8], owners[7]]
    assert owners[7] in module.evict().tolist()  # type: ignore[union-attr]


def test_all_ids_since_a_review_count_however_batches_grow() -> None:
    module = rows_of_ids(ManagedTable(rows=1000, min_count=2, every=4))
    for size in (0, 1, 400):
        step(module, torch.arange(1, size + 1))
    step(module, torch.arange(1, 401))
    module.eval()
    assert len(step(module, torch.arange(1, 401)).unique()) == 400


def test_parts_of_a_table_join_with_the_rows_that_their_ids_have() -> None:
    whole = rows_of_ids(ManagedTable(rows=20, every=1))
    parts = [whole.rebuild_with_output_id_range((first, first + 10), [0, 10, 20]) for first in (0, 10)]
    middle = (IDS + 1) // 2
    known = torch.arange(9), torch.arange(middle, middle + 7)
    asked, expected = [], []
    for part, ids in zip(parts, known, strict=True):
        step(part, ids)
        part.eval()
        asked.append(torch.cat([ids, ids + 100, ids.max() + 1 + torch.arange(2)]))
        expected.append(step(part, asked[-1]))
    states = [part.state_dict() for part in parts]
    joined = {
        name: torch.cat([state[name] for state in states]) if name.startswith("_mch") else value
        for name, value in states[0].items()
    }
    local = LocalRowsOfIds(20, IDS, "cpu")
    local.load_state_dict({name: value for name, value in joined.items() if name not in OF_TRAINING})
    assert torch.equal(local(torch.cat(asked)), torch.cat(expected))  # those without a row too
    with pytest.raises(IndexError):
        torch.nn.Embedding(20, 1)(local(torch.tensor([2 * middle])))
    whole.load_state_dict(joined)
    whole.eval()
    assert torch.equal(step(whole, torch.cat(known)), local(torch.cat(known)))


@pytest.mark.parametrize("tables", [{"item", "tag"}, {"item", "tag", "user"}])  # a part of them, and all
def test_exported_tables_look_up_what_training_does(tables: set[str]) -> None:
    spec, managed = random_spec(), {table: ManagedTable(rows=6, every=1) for table in tables}
    trained = FeatureEmbedding(spec, 8, "cpu", {"tag": 4}, managed_tables=managed)
    for seed in range(3):
        trained(random_batch(spec, seed=seed))
    state = {name: value for name, value in trained.eval().state_dict().items() if not name.endswith(OF_TRAINING)}
    owners = [ids for name, ids in state.items() if name.endswith("_mch_sorted_raw_ids")]
    assert [int((ids != NO_ID).sum()) for ids in owners] == [5] * len(tables)
    local = LocalEmbedding(spec, 8, "cpu", {"tag": 4}, managed_tables=managed)
    local.load_state_dict(state)
    batch = random_batch(spec, seed=7)
    for expected, actual in zip(tensors(trained(batch)), tensors(local(batch)), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("embedding", [FeatureEmbedding, LocalEmbedding])
def test_tables_that_are_not_there_are_refused(embedding: type[FeatureEmbedding | LocalEmbedding]) -> None:
    managed = {"itme": ManagedTable(rows=4)}
    with pytest.raises(ValueError, match=r"model\.managed_tables names 'itme'; .*\+model\.managed_tables\.item\.rows="):
        embedding(random_spec(), 8, managed_tables=managed)

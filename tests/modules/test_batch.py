"""`RequestBatch`: its joint lookup and expansion, also where a side, the histories or all candidates are missing."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from modules.batch import EventType, FeatureSpec, RequestBatch, SparseFeature
from train.data.batch import Events, Ids, empty_batch, pack

COUNTS = np.array([2, 0, 3])


def make_spec(**changes) -> FeatureSpec:
    settings = {
        "tables": {"user": 10, "item": 10, "tag": 10},
        "request": (SparseFeature("user", "user"), SparseFeature("tags", "tag", is_list=True)),
        "candidate": (SparseFeature("item", "item"), SparseFeature("item_tags", "tag", is_list=True)),
        "histories": (EventType("click", (SparseFeature("item", "item"), SparseFeature("tag", "tag")), 4),),
        "request_dense": ("age",),
        "candidate_dense": (),
        "tasks": ("click", "like"),
        "max_candidates": 3,
    }
    return FeatureSpec(**(settings | changes))


def make_batch(spec: FeatureSpec, counts: np.ndarray = COUNTS) -> RequestBatch:
    """Three requests; request r is user r + 1, candidate c is item c + 1."""
    total = int(counts.sum())
    item_tags = Ids(np.arange(total) % 10, np.arange(total) % 3)
    item_tags.values = np.arange(item_tags.lengths.sum()) % 10
    return pack(
        spec,
        request=[Ids(np.array([1, 2, 3])), Ids(np.array([4, 5, 6]), np.array([1, 0, 2]))][: len(spec.request)],
        candidate=[Ids(np.arange(1, total + 1)), item_tags][: len(spec.candidate)],
        request_dense=np.arange(3.0)[:, None],
        candidate_dense=np.zeros((total, 0)),
        histories=[
            Events([np.array([7, 8, 9]), np.array([1, 2, 3])], np.array([10, 20, 30]), np.array([0, 2, 1]))
            for _ in spec.histories
        ],
        request_time=np.array([100, 200, 300]),
        candidate_counts=counts,
        labels=np.zeros((total, 2)),
        group=np.repeat([1, 2, 3], counts),
        row=np.arange(total),
    )


def rows_of(features) -> list[list[list[int]]]:
    """values[key][row] of a KeyedJaggedTensor."""
    return [
        [part.tolist() for part in features[key].values().split(features[key].lengths().tolist())]
        for key in features.keys()
    ]


def assert_same(left: RequestBatch, right: RequestBatch) -> None:
    for mine, theirs in zip(left._parts(), right._parts(), strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine.keys() == theirs.keys()
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine.values(), theirs.values())
            assert torch.equal(mine.lengths(), theirs.lengths())


def test_lookup_lists_each_request_ids_of_all_its_candidates():
    spec = make_spec()
    lookup = make_batch(spec).lookup
    assert lookup.keys() == [name for name, _ in spec.lookups()]
    assert lookup.stride() == 3
    assert rows_of(lookup) == [
        [[1], [2], [3]],
        [[4], [], [5, 6]],
        [[1, 2], [], [3, 4, 5]],
        [[0], [], [1, 2, 3]],
        [[], [7, 8], [9]],
        [[], [1, 2], [3]],
    ]


def test_expand_gives_each_candidate_a_request_of_its_own():
    batch = make_batch(make_spec())
    expanded = batch.expand()
    assert expanded.candidate_offsets.tolist() == [0, 1, 2, 3, 4, 5]
    assert expanded.request_time.tolist() == [100, 100, 300, 300, 300]
    assert expanded.request_dense[:, 0].tolist() == [0, 0, 2, 2, 2]
    assert rows_of(expanded.request_sparse) == [[[1], [1], [3], [3], [3]], [[4], [4], [5, 6], [5, 6], [5, 6]]]
    assert rows_of(expanded.histories) == [[[], [], [9], [9], [9]], [[], [], [3], [3], [3]]]
    assert rows_of(expanded.history_times) == [[[], [], [30], [30], [30]]]
    assert rows_of(expanded.candidate_sparse) == rows_of(batch.candidate_sparse)
    assert_same(expanded.expand(), expanded)


@pytest.mark.parametrize(
    "changes",
    [{}, {"histories": ()}, {"candidate": ()}, {"request": ()}, {"request": (), "candidate": (), "histories": ()}],
    ids=["all", "no histories", "no candidate features", "no request features", "nothing"],
)
@pytest.mark.parametrize("counts", [COUNTS, np.zeros(3, int)], ids=["candidates", "no candidates"])
def test_missing_parts(changes, counts):
    spec = make_spec(**changes)
    batch = make_batch(spec, counts)
    lookup, expanded = batch.lookup, batch.expand()
    assert lookup.keys() == [name for name, _ in spec.lookups()]
    assert lookup.stride() == 3
    assert len(lookup.lengths()) == 3 * len(lookup.keys())
    assert lookup.lengths().sum() == len(lookup.values())
    assert expanded.lookup.stride() == batch.num_candidates == counts.sum()
    assert batch.owner.tolist() == np.repeat(np.arange(3), counts).tolist()
    assert_same(pickle.loads(pickle.dumps(batch)), batch)
    assert_same(batch.to(torch.device("cpu")), batch)


def test_empty_batch_is_one_request_without_candidates():
    batch = empty_batch(make_spec())
    assert (batch.num_requests, batch.num_candidates) == (1, 0)
    assert rows_of(batch.lookup) == [[[0]], [[]], [[]], [[]], [[]], [[]]]
    assert batch.labels.shape == (0, 2)
    assert batch.expand().num_requests == 0


def test_ids_outside_their_table_are_named():
    spec = make_spec(tables={"user": 3, "item": 10, "tag": 10})
    with pytest.raises(
        ValueError, match="id 3 of feature 'user' at request 2 of the batch .* table 'user': expected 0 to 2"
    ):
        make_batch(spec)
    spec = make_spec(tables={"user": 10, "item": 4, "tag": 10})
    with pytest.raises(ValueError, match="id 4 of feature 'item' at source row 3 is outside table 'item'"):
        make_batch(spec)
    with pytest.raises(ValueError, match="id 7 of feature 'click.item' at request 1 of the batch"):
        make_batch(make_spec(tables={"user": 10, "item": 7, "tag": 10}))


def test_negative_id_is_named():
    spec = make_spec(request=(SparseFeature("user", "user"),), candidate=(), histories=())
    with pytest.raises(ValueError, match="id -1 of feature 'user'"):
        pack(
            spec,
            request=[Ids(np.array([-1]))],
            candidate=[],
            request_dense=np.zeros((1, 1)),
            candidate_dense=np.zeros((0, 0)),
            histories=[],
            request_time=np.zeros(1),
            candidate_counts=np.zeros(1),
            labels=np.zeros((0, 2)),
            group=np.zeros(0),
            row=np.zeros(0),
        )


@pytest.mark.parametrize("counts", [COUNTS, np.zeros(3, np.int64)])
def test_a_packed_batch_is_the_same_in_one_piece_of_memory(counts: np.ndarray) -> None:
    batch = make_batch(make_spec(), counts)
    packed = batch.packed()
    again = pickle.loads(pickle.dumps(packed))
    for other in (packed, again, packed.to(torch.device("cpu")), pickle.loads(pickle.dumps(batch))):
        for a, b in zip(batch._parts(), other._parts(), strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b)
                assert a.dtype == b.dtype
            else:
                assert (a.keys(), a.stride(), rows_of(a)) == (b.keys(), b.stride(), rows_of(b))
    assert rows_of(packed.lookup) == rows_of(batch.lookup)
    assert packed.lookup.length_per_key_or_none() == batch.lookup.length_per_key()
    for one in (packed, again):
        assert len({tensor.untyped_storage().data_ptr() for tensor in one._tensors()}) == 1
    moved = packed.to(torch.device("meta"))
    assert {tensor.device.type for tensor in moved._tensors()} == {"meta"}

"""Requests dealt over ranks by cost: same global batches, blocks kept together, less imbalance."""

from __future__ import annotations

import numpy as np
import pytest

from train.config.schema import MovieLensConfig, SyntheticConfig
from train.data import build_source
from train.data.loading.dealing import Cost, Dealer, deal, imbalance
from train.data.loading.loader import LoaderOptions, build_loader
from train.data.source import Source

RANKS, BLOCK = 4, 8


@pytest.fixture(scope="module", params=["movielens", "synthetic"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    if request.param == "movielens":
        return build_source(MovieLensConfig(cache_dir=str(tmp_path_factory.mktemp("cache"))))
    return build_source(SyntheticConfig(num_requests=1000, history_scale={"view": 3.0}))


def test_lengths_are_those_of_the_batch(source: Source) -> None:
    requests = np.array([7, 3, 99, 3])
    batch = source.batch("train", requests)
    lengths = batch.histories.lengths().view(-1, len(requests))
    first = np.cumsum([0, *(len(event.fields) for event in source.spec.histories)])[
        :-1
    ]  # an event's fields are aligned
    assert source.lengths("train", requests).tolist() == lengths[first].sum(0).tolist()


def test_ranks_share_the_same_global_batches_in_whole_blocks(source: Source) -> None:
    def load(rank: int, ranks: int, batch_size: int, dealer: Dealer | None) -> list[list[int]]:
        settings = {"seed": 0, "shuffle": False, "num_workers": 0, "prefetch": 2, "dealer": dealer}
        loader = build_loader(
            source, "train", LoaderOptions(batch_size=batch_size, rank=rank, world_size=ranks, **settings)
        )
        return [batch.row[batch.candidate_offsets[:-1]].tolist() for batch in list(loader)[:3]]

    whole = load(0, 1, RANKS * 16, None)
    dealt = [load(rank, RANKS, 16, Dealer(Cost(1, 2, 3), RANKS, BLOCK)) for rank in range(RANKS)]
    for step, everyone in enumerate(whole):
        assert sorted(row for rank in dealt for row in rank[step]) == sorted(everyone)
        blocks = {tuple(everyone[first : first + BLOCK]) for first in range(0, len(everyone), BLOCK)}
        for rank in dealt:
            assert {tuple(rank[step][first : first + BLOCK]) for first in range(0, 16, BLOCK)} <= blocks


def test_the_last_batch_stays_in_order() -> None:
    source = build_source(SyntheticConfig(num_requests=1000))
    dealer = Dealer(Cost(1, 0, 0), RANKS, BLOCK)
    settings = {"seed": 0, "shuffle": False, "num_workers": 0, "prefetch": 2, "dealer": dealer}
    loader = build_loader(source, "train", LoaderOptions(batch_size=64, rank=1, world_size=RANKS, **settings))
    last = list(loader)[-1]
    assert last.num_requests == 1000 % 256 // RANKS
    assert dealer.compute() == {"imbalance_in_order": 0.0, "imbalance": 0.0}


def test_loads_become_even_and_counts_stay_so() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 4096).astype(np.int64)
    costs = Cost(10, 1, 0.01).of(lengths)
    places = deal(costs, ranks=8, block=16)
    assert sorted(places.ravel()) == list(range(4096))
    assert places.shape == (8, 512)
    before, after = imbalance(costs.reshape(8, -1).sum(1)), imbalance(costs[places].sum(1))
    assert after < before / 5


def test_equal_costs_and_no_costs_are_dealt_all_the_same() -> None:
    assert deal(np.zeros(8), ranks=2, block=2).shape == (2, 4)
    assert imbalance(np.zeros(4)) == 0.0

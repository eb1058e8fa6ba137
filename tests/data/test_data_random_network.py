"""Labels of `data.signal=network`: of the request alone, as hard to know as the module says, and of its histories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.config.schema import SyntheticConfig
from train.data.batch import Events
from train.data.random_network import RANK, SCALE, SHARPNESS, SPECTRUM, RandomNetwork, _attend
from train.data.synthetic import SyntheticSource
from train.metrics import log_loss, normalized_entropy

SIZES = {"num_users": 1000, "num_items": 1000, "num_categories": 32, "candidates": 3, "num_requests": 20_000}


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return SyntheticSource(SyntheticConfig(**SIZES, signal="network"))


def test_the_signal_is_a_population_of_its_own_and_the_default_one_is_as_before(source: SyntheticSource) -> None:
    assert SyntheticSource(SyntheticConfig()).fingerprint == "01fd5961a434e3d6"
    before = SyntheticSource(SyntheticConfig(**SIZES))
    assert source.fingerprint != before.fingerprint
    numbers = np.arange(200)
    mine, theirs = source.batch("train", numbers), before.batch("train", numbers)
    assert torch.equal(mine.candidate_dense, theirs.candidate_dense)  # the same features, other labels
    assert not torch.equal(mine.labels, theirs.labels)


def test_labels_do_not_depend_on_other_requests_of_a_batch(source: SyntheticSource) -> None:
    together = source.bayes_logits("valid", np.array([7, 1, 900]))
    alone = [source.bayes_logits("valid", np.array([number])) for number in (7, 1, 900)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-4)


def test_how_much_can_be_known_and_how_much_of_it_from_histories(source: SyntheticSource) -> None:
    numbers = np.arange(8000)
    labels, rates = source.batch("valid", numbers).labels, torch.tensor(list(source.label_rates().values()))
    ne = []
    for histories in (True, False):
        logits = torch.from_numpy(source.bayes_logits("valid", numbers, histories))
        losses = log_loss(logits, labels).mean(0)
        ne.append([normalized_entropy(each.item(), rate.item()) for each, rate in zip(losses, rates, strict=True)])
    full, without = np.array(ne)
    assert ((full > 0.7) & (full < 0.8)).all()
    assert (without > full + 0.05).all()
    logits = source.bayes_logits("valid", numbers)
    np.testing.assert_allclose(logits.std(0), SCALE, rtol=0.15)
    assert abs(np.corrcoef(logits.T)[0, 1]) < 0.9  # signs of its own in each task


def test_attention_is_that_of_a_loop_over_newest_events() -> None:
    generator = np.random.default_rng(0)
    scores, values = generator.normal(size=(2, 5, 5))
    events = Events([np.zeros(6, np.int64), generator.integers(0, 5, 6)], np.zeros(6), np.array([4, 0, 2]))
    owner, category = np.array([0, 0, 1, 2]), generator.integers(0, 5, 4)
    for newest in (None, 3):
        read = _attend(owner, category, events, scores, values, newest)
        for candidate, (request, mine) in enumerate(zip(owner, category, strict=True)):
            end = events.lengths[: request + 1].sum()
            seen = events.fields[1][end - events.lengths[request] : end][-(newest or 99) :]
            weights = np.exp(SHARPNESS * scores[mine, seen])
            expected = (weights * values[mine, seen]).sum() / weights.sum() if len(seen) else 0
            assert read[candidate] == pytest.approx(expected)


def test_pairs_are_dot_products_weighted_by_the_spectrum() -> None:
    def effects(name: str, ids: np.ndarray, columns: int) -> np.ndarray:
        return np.random.default_rng(len(name)).normal(size=(64, columns))[ids]

    network = RandomNetwork(effects, num_categories=4, num_types=0, num_numbers=0)
    ids = {"a": np.array([1, 1, 3]), "bb": np.array([2, 0, 2]), "ccc": np.array([9, 9, 0])}
    latent = [effects(f"latent {name}", each, RANK) for name, each in ids.items()]
    expected = sum((latent[i] * latent[j]) @ SPECTRUM for i, j in ((0, 1), (0, 2), (1, 2)))
    parts = network.plain(ids, np.zeros((3, 0)))
    np.testing.assert_allclose(parts[:, 0], expected, rtol=1e-6)
    assert (SPECTRUM**2).sum() == pytest.approx(1)
    assert network.of_histories(np.zeros(3, np.int64), np.zeros(3, np.int64), []).shape == (3, 3)

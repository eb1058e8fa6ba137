"""The synthetic stream: a pure function of the request's number, with the distributions and the signal it promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from tests.data.sources import JitteredSource
from tests.modules.test_batch import assert_same
from train.config.schema import SyntheticConfig
from train.data.features.vocabulary import GOLDEN, splitmix64
from train.data.synthetic import SyntheticSource, _normal, _stride, _uniform, _zipf

SMALL = {"num_users": 1000, "num_items": 2000, "num_categories": 50, "candidates": 4}


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return JitteredSource(SyntheticConfig(**SMALL))


@pytest.fixture(scope="module")
def sample(source):
    return source.batch("train", np.arange(20_000))


def test_splitmix_is_the_published_generator():
    # First outputs of SplitMix64 seeded with 0: counters are multiples of its increment.
    first = splitmix64(np.arange(1, 4, dtype=np.uint64) * GOLDEN)
    assert [hex(value) for value in first.tolist()] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_request_does_not_depend_on_those_beside_it(source, split):
    numbers = np.array([5, 99_000, 3, 12])
    together = source.batch(split, numbers)
    for index, number in enumerate(numbers):
        alone = source.batch(split, np.array([number]))
        first, end = together.candidate_offsets[index].item(), together.candidate_offsets[index + 1].item()
        assert torch.equal(alone.labels, together.labels[first:end])
        assert torch.equal(alone.candidate_dense, together.candidate_dense[first:end])
        assert torch.equal(alone.request_dense[0], together.request_dense[index])
        assert alone.row.tolist() == together.row[first:end].tolist()
        keys = zip(*(batch.lookup.to_dict().values() for batch in (alone, together)), strict=True)
        for mine, all_of_them in keys:
            lengths = all_of_them.lengths().tolist()
            assert torch.equal(mine.values(), all_of_them.values().split(lengths)[index])
    assert_same(source.batch(split, numbers), together)


def test_splits_and_seeds_differ(source):
    train, valid = source.batch("train", np.arange(50)), source.batch("valid", np.arange(50))
    other = JitteredSource(SyntheticConfig(**SMALL, seed=1)).batch("train", np.arange(50))
    for batch in (valid, other):
        assert not torch.equal(batch.request_dense, train.request_dense)
        assert not torch.equal(batch.request_sparse.values(), train.request_sparse.values())
    assert train.request_time.max() < valid.request_time.min()
    assert source.num_requests("train") == 1_000_000
    assert source.num_requests("test") == 100_000
    assert SyntheticSource(SyntheticConfig(eval_requests=7)).num_requests("valid") == 7


def test_fingerprint_is_that_of_the_population(source):
    def fingerprint(**changes) -> str:
        return SyntheticSource(SyntheticConfig(**(SMALL | changes))).fingerprint

    assert fingerprint(num_requests=10, mean_history=3.0, candidates=1) == source.fingerprint
    changes = [{"seed": 1}, {"num_items": 2001}, {"num_categories": 51}, {"event_types": ["view", "click"]}]
    assert len({source.fingerprint, *(fingerprint(**change) for change in changes)}) == 1 + len(changes)


def test_batch_keeps_its_promises(source, sample):
    config = source.config
    counts = sample.candidate_offsets.diff()
    assert set(counts.tolist()) == {0, 1, 2, 3, 4}
    assert counts.float().mean() == pytest.approx(2, abs=0.05)
    assert sample.row.unique().numel() == sample.num_candidates
    assert source.locate(int(sample.row[-1])).startswith("synthetic request 19999, candidate")
    users = torch.stack([sample.group, sample.request_sparse["user"].values()[sample.owner]])
    assert users.unique(dim=1).shape[1] == users[0].unique().numel() == users[1].unique().numel()
    pairs = [torch.stack([sample.candidate_sparse[field].values() for field in ("item", "category")])]
    for event in source.spec.histories:
        lengths = sample.history_times[event.name].lengths()
        times = sample.history_times[event.name].values()
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        assert lengths.max() == config.max_history
        assert (times < sample.request_time[owner]).all()
        assert (times.diff()[owner.diff() == 0] > 0).all()
        pairs.append(
            torch.stack([sample.histories[f"{event.name}.{field}"].values() for field in ("item", "category")])
        )
    items, categories = torch.cat(pairs, dim=1).unique(dim=1)
    assert items.unique().numel() == items.numel()  # an item is always of the same category
    assert categories.unique().tolist() == list(range(1, config.num_categories + 1))


def test_shards_of_a_table_by_rows_are_looked_up_equally():
    source = SyntheticSource(SyntheticConfig(num_items=40_000, num_users=40_000))
    batch = source.batch("train", np.arange(4000))
    for features, name in ((batch.request_sparse, "user"), (batch.histories, "click.item")):
        shares = np.bincount((features[name].values() - 1) // 10_000, minlength=4) / len(features[name].values())
        assert shares == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000])
def test_a_row_belongs_to_one_id(size):
    assert sorted(np.arange(size) * _stride(size) % size) == list(range(size))


def test_history_lengths_are_log_normal():
    source = SyntheticSource(
        SyntheticConfig(mean_history=50.0, history_sigma=0.5, max_history=10_000, event_types=["a"])
    )
    lengths = source.batch("train", np.arange(5000)).history_times.lengths().numpy()
    logs = np.log(lengths + 0.5)  # lengths are rounded down
    # Standard errors over 5,000 draws: 0.4 of the mean, 0.005 of sigma.
    assert lengths.mean() + 0.5 == pytest.approx(50, abs=2)
    assert logs.std() == pytest.approx(0.5, abs=0.02)


def test_event_types_may_have_histories_of_lengths_of_their_own():
    scale = {"click": 1.0, "buy": 0.2}
    options = {"mean_history": 51.0, "max_history": 50, "history_sigma": 0.0, "event_types": ["click", "view", "buy"]}
    source = SyntheticSource(SyntheticConfig(**options, history_scale=scale))
    assert [event.max_length for event in source.spec.histories] == [50, 50, 10]
    lengths = source.batch("train", np.arange(3)).history_times.lengths()
    assert lengths.tolist() == [50] * 6 + [10] * 3
    with pytest.raises(ValueError, match="data.history_scale names 'like'; data.event_types are click, view, buy"):
        SyntheticSource(SyntheticConfig(**options, history_scale={"like": 2.0}))
    with pytest.raises(ValueError, match="must be positive numbers"):
        SyntheticSource(SyntheticConfig(**options, history_scale={"buy": 0.0}))


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.05, 1.5])
def test_ids_follow_the_bounded_zipf_law(exponent):
    uniform = (np.arange(200_000) + 0.5) / 200_000
    ids = _zipf(uniform, 500, exponent)
    assert (ids.min(), ids.max()) == (0, 499)
    edges = np.arange(1, 502.0)
    primitive = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(primitive) / (primitive[-1] - primitive[0])
    # Equally spaced uniforms: each id's count is off by at most one.
    assert np.abs(np.bincount(ids, minlength=500) - expected * 200_000).max() <= 1.01
    assert (np.diff(expected) < 0).all()


def test_draws_have_their_distributions():
    bits = splitmix64(np.arange(200_000, dtype=np.uint64) * GOLDEN)
    uniform, normal = _uniform(bits), _normal(bits)
    # Tolerances are four standard errors.
    assert uniform.mean() == pytest.approx(0.5, abs=4 * 0.29 / 447)
    assert normal.mean() == pytest.approx(0, abs=4 / 447)
    assert normal.std() == pytest.approx(1, abs=4 * 0.71 / 447)
    assert (normal**4).mean() == pytest.approx(3, abs=4 * 9.8 / 447)
    assert np.isfinite(_normal(np.array([0, 2**64 - 1], np.uint64))).all()


def test_labels_follow_the_planted_probability(source, sample):
    logits = source.bayes_logits("train", np.arange(20_000))
    probability = 1 / (1 + np.exp(-logits))
    for task, name in enumerate(source.spec.tasks):
        labels = sample.labels[:, task].numpy()
        for low in np.arange(0, 1, 0.2):
            inside = (probability[:, task] >= low) & (probability[:, task] < low + 0.2)
            assert inside.sum() > 500
            expected = probability[inside, task].mean()
            error = 4 * np.sqrt(expected * (1 - expected) / inside.sum())
            assert labels[inside].mean() == pytest.approx(expected, abs=error)
        assert source.label_rates()[name] == pytest.approx(labels.mean(), abs=0.02)


def test_histories_carry_much_of_the_signal(source, sample):
    numbers = np.arange(20_000)
    full, blind = source.bayes_logits("train", numbers), source.bayes_logits("train", numbers, histories=False)
    for task in range(2):
        labels = sample.labels[:, task]
        assert roc_auc_score(labels, full[:, task]) > 0.8
        assert 0.6 < roc_auc_score(labels, blind[:, task]) < 0.75
    # Tasks differ, and listen to different events.
    assert 0.5 < np.corrcoef((full - blind).T)[0, 1] < 0.99


def test_histories_show_what_decides_the_label(source, sample):
    """The share of same-category events, counted from the batch alone, explains the part of the logit it should."""
    numbers = np.arange(20_000)
    part = source.bayes_logits("train", numbers) - source.bayes_logits("train", numbers, histories=False)
    owner, category = sample.owner.numpy(), sample.candidate_sparse["category"].values().numpy()
    shares = []
    for event in source.spec.histories:
        lengths = sample.history_times[event.name].lengths().numpy()
        events = np.repeat(np.arange(len(lengths)), lengths)
        counts = np.zeros((len(lengths), source.config.num_categories + 1))
        np.add.at(counts, (events, sample.histories[f"{event.name}.category"].values().numpy()), 1)
        shares.append(counts[owner, category] / np.maximum(lengths[owner], 1))
    np.testing.assert_allclose(part[:, 0], 9 * shares[0] + 3 * shares[1], atol=1e-5)
    np.testing.assert_allclose(part[:, 1], 3 * shares[0] + 9 * shares[1], atol=1e-5)


def test_shape_is_the_configurations():
    config = SyntheticConfig(
        num_request_features=1, num_candidate_features=2, event_types=[], tasks=["buy"], candidates=3
    )
    source = SyntheticSource(config)
    batch = source.batch("train", np.arange(10))
    assert batch.lookup.keys() == ["user", "item", "category"]
    assert (batch.num_candidates, batch.request_dense.shape, batch.labels.shape) == (30, (10, 8), (30, 1))
    assert batch.history_times.keys() == []


def test_copied_requests_are_the_same_candidates_with_a_request_each() -> None:
    shared, copied = (JitteredSource(SyntheticConfig(**SMALL, copy_requests=copy)) for copy in (False, True))
    numbers = np.arange(30)
    assert_same(copied.batch("train", numbers), shared.batch("train", numbers).expand())
    assert copied.spec.max_candidates == 1
    events = [copied.batch("train", numbers[i : i + 1]).history_times.values().numel() for i in numbers]
    assert copied.lengths("train", numbers).tolist() == events

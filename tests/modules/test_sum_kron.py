"""SumKronLinear and the pooling that ends in it, against their sums written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modules.layers.interaction.sum_kron import SumKronLinear
from modules.layers.norms import rms_norm
from modules.layers.pooling.seed_pooling import SeedPooling


@pytest.mark.parametrize(("terms", "out_dim"), [(1, None), (3, 6)])
def test_sum_kron_linear_is_the_sum_of_its_products(terms: int, out_dim: int | None) -> None:
    torch.manual_seed(0)
    layer = SumKronLinear(5, 2, 4, terms=terms, out_dim=out_dim).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    z = layer.mix.candidate.weight.view(2, terms, 5)  # of token t, term i
    w = layer.project.weight.view(-1, terms, 4)  # W_i^T
    expected = torch.einsum("tis,bsd,eid->bte", z, x, w)
    actual = layer(x)
    torch.testing.assert_close(actual, expected)
    inputs, cotangent = (x, *layer.parameters()), torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_sum_kron_linear_takes_the_cheap_order() -> None:
    seeds, tokens, dim, terms = 32, 4, 16, 3
    layer = SumKronLinear(seeds, tokens, dim, terms=terms)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(2, seeds, dim))
    cheap = 2 * terms * (seeds * tokens * dim + tokens * dim * dim)
    assert counter.get_total_flops() == 2 * cheap
    assert sum(p.numel() for p in layer.parameters()) == terms * (seeds * tokens + dim * dim)
    assert cheap < 2 * terms * (seeds * dim * dim + seeds * tokens * dim)  # features first


def test_sum_kron_linear_keeps_variance_whatever_its_sizes() -> None:
    torch.manual_seed(0)
    for sizes in ((64, 4, 32), (8, 32, 128)):
        out = SumKronLinear(*sizes, terms=4)(torch.randn(64, sizes[0], sizes[2]))
        assert 0.2 < out.std() < 0.5  # each of its two uniform matrices has a variance of 1 / (3 inputs)


@pytest.mark.parametrize("terms", [0, 2])
def test_seed_pooling_is_attention_of_seeds_then_compression(terms: int) -> None:
    torch.manual_seed(0)
    num_seeds, lengths = (3 if terms == 0 else 5), [4, 0, 2]
    layer = SeedPooling(8, 2, num_seeds=num_seeds, num_tokens=3, terms=terms, max_length=4, out_dim=6).double()
    offsets = torch.tensor([0, 4, 4, 6])
    values = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    rows = []
    for row in range(len(lengths)):
        events = values[offsets[row] : offsets[row + 1]]
        query = layer.query(rms_norm(layer.seeds)).view(num_seeds, 2, 4).transpose(0, 1)
        key, value = (each.view(-1, 2, 4).transpose(0, 1) for each in layer.key_value(events).chunk(2, -1))
        weights = (query @ key.mT / 2).softmax(-1)
        rows.append((weights @ value).transpose(0, 1).flatten(1))
    expected, actual = layer.compress(torch.stack(rows)), layer(values, offsets)
    assert actual.shape == (3, 3, 6)
    assert not actual[1].any()
    torch.testing.assert_close(actual, expected)
    inputs, cotangent = (values, *layer.parameters()), torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_seeds_without_compression_are_the_tokens() -> None:
    with pytest.raises(ValueError, match="num_seeds=5 must be num_tokens=3, or terms at least 1"):
        SeedPooling(8, 2, num_seeds=5, num_tokens=3, terms=0, max_length=4)

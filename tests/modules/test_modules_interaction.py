"""Feature interaction against its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from modules.broadcast import CandidateRows
from modules.layers.interaction.dot_cross import (
    ENSEMBLES,
    CrossNet,
    DHENLayer,
    DotInteraction,
    gram,
    inner_products,
    narrowed,
)
from modules.layers.interaction.wukong import WukongLayer


def test_dot_interaction_is_the_upper_triangle():
    tokens = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = [(tokens[:, i] * tokens[:, j]).sum(-1) for i in range(3) for j in range(i + 1, 3)]
    torch.testing.assert_close(DotInteraction(3, scale=0.5)(tokens), 0.5 * torch.stack(expected, 1))
    assert DotInteraction(3).num_pairs == 3
    assert DotInteraction(1)(tokens[:, :1]).shape == (4, 0)


def test_made_without_memory_dot_interaction_has_its_pairs():
    tokens = torch.randn(3, 5, 4)
    whole = DotInteraction(5)
    with torch.device("meta"):
        assigned, moved = DotInteraction(5), DotInteraction(5)
    assigned.load_state_dict(whole.state_dict(), assign=True)
    moved.to_empty(device="cpu").pairs.zero_()
    moved.reset_parameters()
    for module in (assigned, moved):
        assert torch.equal(module(tokens), whole(tokens))


def test_cross_net_multiplies_by_its_input_in_every_layer():
    net = CrossNet(width=6, num_layers=2, rank=2).double()
    x0 = torch.randn(4, 6, dtype=torch.float64)
    x = x0
    for down, up in zip(net.down, net.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    torch.testing.assert_close(net(x0), x)


@pytest.mark.parametrize("ensemble", ENSEMBLES)
def test_dhen_layer_normalises_the_ensemble_plus_shortcut(ensemble: str):
    layer = DHENLayer(3, 4, rank=2, hidden=[5], dropout=0.0, ensemble=ensemble).double()
    y = tokens = torch.randn(2, 3, 4, dtype=torch.float64)
    if ensemble != "dcnv2":
        gram = tokens @ tokens.mT / 4**0.5
        pairs = torch.stack([gram[:, 0, 1], gram[:, 0, 2], gram[:, 1, 2]], dim=1)
        y = y + layer.dot_output(layer.dot_hidden.own(pairs)).view(2, 3, 4)
    if ensemble != "dot":
        x = tokens.flatten(1)
        y = y + (x * layer.up(layer.down.own(x)) + x).view(2, 3, 4)
    torch.testing.assert_close(layer(tokens), y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert layer(tokens[:0]).shape == (0, 3, 4)


@pytest.mark.parametrize(
    ("num_shared", "hidden", "ensemble"), [(1, [5], "dhen"), (3, [5], "dhen"), (3, [], "dhen"), (3, [], "dot")]
)
def test_shared_tokens_of_a_dhen_layer_are_tokens_of_every_candidate(num_shared: int, hidden: list[int], ensemble: str):
    torch.manual_seed(0)
    num_own, dim = 2, 4
    options = {"rank": 2, "hidden": hidden, "dropout": 0.0, "ensemble": ensemble}
    layer = DHENLayer(num_own, dim, num_request=num_shared, max_candidates=3, **options).double()
    whole = DHENLayer(num_shared + num_own, dim, **options).double()
    with torch.no_grad():
        # The same maps in the order of one set of tokens: shared ones first, pairs i < j row by row.
        if ensemble == "dhen":
            own_first = torch.cat([layer.down.own.weight, layer.down.shared.weight], 1)
            whole.down.own.weight.copy_(own_first.roll(num_shared * dim, 1))
            whole.up.load_state_dict(layer.up.state_dict())
        whole.dot_output.load_state_dict(layer.dot_output.state_dict())
        whole.dot_hidden.own.bias.copy_(layer.dot_hidden.own.bias)
        parts = [layer.dot_hidden.own, *filter(None, [layer.dot_hidden.shared])]
        columns = torch.cat([part.weight for part in parts], 1)
        names = [(i, j) for i in range(num_own) for j in range(i + 1, num_own)]
        names = [(i + num_shared, j + num_shared) for i, j in names]
        names += [(j, i + num_shared) for i in range(num_own) for j in range(num_shared)]
        names += [(i, j) for i in range(num_shared) for j in range(i + 1, num_shared)]
        whole.dot_hidden.own.weight.copy_(columns[:, [names.index(pair) for pair in sorted(names)]])
    rows = CandidateRows(torch.tensor([0, 0, 0, 2]), torch.tensor([0, 3, 3, 4]))
    own = torch.randn(4, num_own, dim, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(3, num_shared, dim, dtype=torch.float64, requires_grad=True)
    actual = layer(own, shared, rows)
    expected = whole(torch.cat([shared[rows.owner], own], 1))
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, (own, shared), cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def wukong(num_candidate: int, num_request: int, num_out: int) -> WukongLayer:
    options = {"num_fmb": 2, "num_lcb": num_out - 2, "rank": 3, "hidden": [6], "dropout": 0.0, "max_candidates": 3}
    return WukongLayer(num_candidate, 4, num_request=num_request, **options).double()


@pytest.mark.parametrize("num_out", [5, 7])
def test_wukong_layer_is_machine_and_compression_plus_residual(num_out: int):
    torch.manual_seed(0)
    layer = wukong(5, 0, num_out)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    y = layer.project.candidate.weight.T  # [n, rank]
    products = (x @ (x.mT @ y) / 4**0.5).flatten(1)
    products = products / (products.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    mixed = torch.cat([layer.fmb(products).view(4, 2, 4), layer.lcb.candidate.weight @ x], 1)
    mixed = mixed + (x if num_out == 5 else layer.residual.candidate.weight @ x)
    torch.testing.assert_close(layer(x), mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert layer(x[:0]).shape == (0, num_out, 4)
    assert torch.autograd.gradcheck(lambda x, *weights: layer(x), (x.requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("num_out", [5, 7])
def test_shared_tokens_of_a_wukong_layer_are_tokens_of_every_candidate(num_out: int):
    torch.manual_seed(0)
    layer, whole = wukong(2, 3, num_out), wukong(5, 0, num_out)
    whole.fmb.load_state_dict(layer.fmb.state_dict())
    mixtures = ["project", "lcb", *(["residual"] if num_out == 7 else [])]
    with torch.no_grad():
        for name in mixtures:
            parts = getattr(layer, name)
            both = torch.cat([parts.request.weight, parts.candidate.weight], 1)
            getattr(whole, name).candidate.weight.copy_(both)
    rows = CandidateRows(torch.tensor([0, 0, 0, 2]), torch.tensor([0, 3, 3, 4]))
    own = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
    shared = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(own, shared, rows), whole(torch.cat([shared[rows.owner], own], 1))
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, (own, shared), cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_inner_products_are_no_views() -> None:
    tokens, others = (torch.randn(3, count, 5, dtype=torch.float64, requires_grad=True) for count in (4, 2))
    assert torch.autograd.gradcheck(inner_products, (tokens, others))
    made = torch.autograd.grad(inner_products(tokens, others).square().sum(), (tokens, others))
    assert all(each.is_contiguous() for each in made)


def test_gradients_of_products_with_each_other() -> None:
    tokens = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gram, (tokens,))
    torch.testing.assert_close(gram(tokens), tokens @ tokens.mT)
    (made,) = torch.autograd.grad(gram(tokens).square().sum(), tokens)
    assert made.is_contiguous()


def test_what_several_products_read_is_rounded_once_and_its_gradients_add_up_unrounded() -> None:
    x = torch.randn(64, 3, requires_grad=True)
    assert all(each is x for each in narrowed(x, 3))  # outside of autocast
    cotangents = torch.randn(3, 64, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        unread, *readers = narrowed(x, 4)
        assert all(torch.equal(each, x.bfloat16()) for each in (unread, *readers))
        assert len({each.data_ptr() for each in readers}) == 1
    (actual,) = torch.autograd.grad(readers, x, list(cotangents), retain_graph=True)
    # Exactly: three values of 8 bits each are added up in another order at most.
    torch.testing.assert_close(actual, cotangents.float().sum(0), rtol=2**-22, atol=2**-22)
    (one,) = torch.autograd.grad(readers[0], x, cotangents[0], retain_graph=True)
    assert torch.equal(one, cotangents[0].float())
    assert torch.autograd.grad(unread * 0, x, cotangents[0])[0].eq(0).all()


@pytest.mark.parametrize("num_shared", [0, 3])
def test_a_dhen_layer_rounds_its_tokens_once(num_shared: int) -> None:
    layer = DHENLayer(2, 4, rank=2, hidden=[5], dropout=0.0, num_request=num_shared, max_candidates=3)
    own = torch.randn(4, 2, 4, requires_grad=True)
    shared = torch.randn(3, num_shared, 4, requires_grad=True) if num_shared else None
    rows = CandidateRows(torch.tensor([0, 0, 0, 2]), torch.tensor([0, 3, 3, 4])) if num_shared else None
    rounded = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
                rounded.append(args[0].untyped_storage().data_ptr())
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(own, shared, rows)
        with Casts():
            actual = layer(own, shared, rows)
    assert torch.equal(actual, expected)
    for tokens in (own, shared):
        if tokens is not None:
            assert rounded.count(tokens.untyped_storage().data_ptr()) == 1

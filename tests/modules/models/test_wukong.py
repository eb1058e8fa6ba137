"""The machines of Wukong layers and the experts made of them, against their equations on all tokens of a candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.broadcast import CandidateRows
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.interaction.wukong import WukongConfig, WukongExperts, WukongLayer, _Deal
from modules.models.wukong import Wukong
from tests.modules import padded
from tests.modules.factories import random_batch, random_spec

DIM, OWN, SHARED = 4, 2, 3
ROWS = CandidateRows(torch.tensor([0, 0, 0, 2]), torch.tensor([0, 3, 3, 4]))


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def lce(layer: Any, x: Tensor) -> Tensor:
    parts = [layer.candidate.weight] if layer.request is None else [layer.request.weight, layer.candidate.weight]
    return torch.cat(parts, 1) @ x


def inputs(own: int = OWN, shared: int = SHARED) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of candidates, of requests, and all of a candidate: [C, n, d]."""
    torch.manual_seed(1)
    candidate = norm(torch.randn(4, own, DIM, dtype=torch.float64)).requires_grad_()
    request = norm(torch.randn(3, shared, DIM, dtype=torch.float64)).requires_grad_()
    return candidate, request, torch.cat([request[ROWS.owner], candidate], 1)


def assert_same(actual: Tensor, expected: Tensor, module: nn.Module, *leaves: Tensor) -> None:
    torch.testing.assert_close(actual, expected)
    given, cotangent = (*leaves, *module.parameters()), torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, given, cotangent) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(a, b)


def layer(own: int, shared: int, **options: Any) -> WukongLayer:
    torch.manual_seed(0)
    common: dict[str, Any] = {"num_fmb": 2, "num_lcb": 3, "rank": 3, "hidden": [8], "dropout": 0.0, "max_candidates": 3}
    return WukongLayer(own, DIM, num_request=shared, **common | options).double()


@pytest.mark.parametrize("num_lcb", [3, 4], ids=["keeps", "projects"])
def test_layer_with_tokens_of_a_request_is_one_over_all_tokens(num_lcb: int) -> None:
    module = layer(OWN, SHARED, num_lcb=num_lcb)
    candidate, request, x = inputs()
    products = x @ (lce(module.project, x)).mT / DIM**0.5
    fmb = module.fmb(norm(products.flatten(1))).unflatten(1, (-1, DIM))
    residual = x if module.residual is None else lce(module.residual, x)
    expected = norm(torch.cat([fmb, lce(module.lcb, x)], 1) + residual)
    assert (module.residual is None) == (num_lcb == 3)
    assert_same(module(candidate, request, ROWS), expected, module, candidate, request)


def test_products_do_not_grow_with_the_number_of_tokens() -> None:
    """What the MLP reads has unit variance, and its parts before the norm stay near it: safe in half precision."""
    for number in (4, 400):
        torch.manual_seed(0)
        module = WukongLayer(number, 16, num_fmb=2, num_lcb=2, rank=4, hidden=[8], dropout=0.0)
        x = norm(torch.randn(8, number, 16))
        assert 0.05 < module.project(x).std() < 2.0
        assert 0.9 < module(x).square().mean() < 1.1


def test_the_model_is_layers_over_all_tokens_then_a_head() -> None:
    torch.manual_seed(0)
    spec = random_spec()
    config = Wukong.Config(
        dim=8, num_layers=3, wukong=WukongConfig(num_fmb=4, num_lcb=3, rank=3), hidden=[16], head_hidden=[16]
    )
    model, batch = Wukong(spec, config), random_batch(spec)
    tokens = FeatureEmbedding(spec, 8, "cpu")(batch)
    x = []
    for candidate, row in zip(tokens.candidate, batch.owner.tolist(), strict=True):
        means = []
        for history in tokens.histories.values():
            events = history.values[history.offsets[row] : history.offsets[row + 1]].view(-1, 2, 8)
            means.append(events.sum(0) / max(1, len(events)))
        x.append(torch.cat([tokens.request[row], *means, candidate]))
    y = padded.norm(torch.stack(x))
    for each in model.layers:
        y = padded.wukong(each, y)
    # Float32 sums in another order, on logits near 1.
    torch.testing.assert_close(model(tokens, batch), model.heads(y.flatten(1)), atol=1e-5, rtol=1e-4)


def experts(own: int, shared: int, number: int) -> WukongExperts:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_fmb": 2, "num_lcb": 1, "rank": 2, "hidden": [8], "dropout": 0.0}
    share: dict[str, Any] = {"num_request": shared, "max_candidates": 3}
    return WukongExperts(own, DIM, num_experts=number, num_layers=2, **share, **options).double()


@pytest.mark.parametrize(("own", "shared"), [(5, 4), (3, 1)], ids=["shared by all", "shared by one"])
def test_experts_share_the_tokens_out_and_their_results_follow_each_other(own: int, shared: int) -> None:
    module = experts(own, shared, 3)
    candidate, request, _ = inputs(own, shared)
    made = []
    for index, (first, second) in enumerate(module.experts):
        part = torch.cat([request[ROWS.owner][:, index::3], candidate[:, index::3]], 1)
        assert first.num_tokens == part.shape[1]
        given = request[:, index::3] if first.num_request else None
        made.append(second(first(candidate[:, index::3], given, ROWS if first.num_request else None)))
    assert module.num_tokens == 9
    assert_same(module(candidate, request, ROWS), torch.cat(made, 1), module, candidate, request)


def test_a_token_reaches_the_results_of_its_own_expert_only() -> None:
    module = experts(4, 2, 2)
    candidate, request, _ = inputs(4, 2)
    changed = candidate.detach().clone()
    changed[:, 1] += 1
    moved = (module(changed, request, ROWS) - module(candidate, request, ROWS)).abs().amax((0, 2))
    assert moved[:3].max() == 0
    assert moved[3:].min() > 0


def test_more_experts_than_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_experts=3 share 2 tokens of a candidate, at least one each"):
        experts(2, 0, 3)


@pytest.mark.parametrize(("count", "number"), [(6, 3), (7, 3), (2, 3), (1, 1)])
def test_shares_of_experts_give_their_gradients_back(count: int, number: int) -> None:
    tokens = torch.randn(2, count, 3, dtype=torch.float64, requires_grad=True)
    assert all(torch.equal(share, tokens[:, index::number]) for index, share in enumerate(_Deal.apply(tokens, number)))
    assert torch.autograd.gradcheck(lambda tokens: _Deal.apply(tokens, number), (tokens,))


def test_one_expert_learns_in_compiled_code() -> None:
    """PyTorch 2.11 gives gradients of zeros behind a contiguous() that changes nothing."""
    tokens = torch.randn(2, 3, 4, requires_grad=True)
    compiled = torch.compile(lambda tokens: _Deal.apply(tokens, 1)[0] * 2, backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(tokens).sum(), tokens)
    assert (gradient == 2).all()

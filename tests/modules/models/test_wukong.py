"""The machines of Wukong layers and the experts made of them, against their equations on all tokens of a candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.interaction.wukong import AttentiveCompression, PairMachine, WukongExperts, WukongLayer, _Deal
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


def test_attentive_compression_makes_the_mixture_of_each_candidate() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_compressed": 2, "hidden": [5], "dropout": 0.0, "max_candidates": 3}
    module = AttentiveCompression(OWN, DIM, 3, num_request=SHARED, **options).double()
    candidate, request, x = inputs()
    weights = module.weights(norm(lce(module.compress, x)).flatten(1)).view(4, 3, 5) / 5**0.5
    assert_same(module(candidate, request, ROWS), weights @ x, module, candidate, request)


@pytest.mark.parametrize("hidden", [[6], [6, 5], []], ids=str)
def test_pair_machine_normalises_all_pairs_of_a_candidate_as_one_vector(hidden: list[int]) -> None:
    torch.manual_seed(0)
    module = PairMachine(OWN, DIM, hidden, 8, 0.0, num_request=SHARED, max_candidates=3).double()
    nn.init.normal_(module.bias)
    candidate, request, x = inputs()
    gram = x @ x.mT / DIM**0.5

    def pairs(rows: range, columns: range) -> Tensor:
        return torch.stack([gram[:, i, j] for i in rows for j in columns if i < j or columns is not rows], 1)

    of_request, of_candidate = range(SHARED), range(SHARED, SHARED + OWN)
    order = [pairs(of_candidate, of_candidate), pairs(of_candidate, of_request), pairs(of_request, of_request)]
    assert module.first.shared is not None
    weight = torch.cat([module.first.own.weight, module.first.shared.weight], 1)
    expected = module.rest(F.linear(norm(torch.cat(order, 1)), weight, module.bias))
    assert module.num_pairs == 10
    assert_same(module(candidate, request, ROWS), expected, module, candidate, request)


@pytest.mark.parametrize("machine", ["optimised", "plain", "attentive"])
@pytest.mark.parametrize("num_lcb", [3, 4], ids=["keeps", "projects"])
def test_layer_with_tokens_of_a_request_is_one_over_all_tokens(machine: str, num_lcb: int) -> None:
    module = layer(OWN, SHARED, machine=machine, num_lcb=num_lcb, attention_hidden=[5])
    candidate, request, x = inputs()
    fmb = module._machine(candidate, request, ROWS).unflatten(1, (-1, DIM))
    residual = x if module.residual is None else lce(module.residual, x)
    expected = norm(torch.cat([fmb, lce(module.lcb, x)], 1) + residual)
    assert (module.residual is None) == (num_lcb == 3)
    assert_same(module(candidate, request, ROWS), expected, module, candidate, request)


def test_no_machine_grows_with_the_number_of_tokens() -> None:
    """What the MLP reads has unit variance, and its parts before the norm stay near it: safe in half precision."""
    for machine in ("optimised", "plain", "attentive"):
        for number in (4, 400):
            torch.manual_seed(0)
            module = WukongLayer(number, 16, num_fmb=2, num_lcb=2, rank=4, hidden=[8], dropout=0.0, machine=machine)
            seen: list[Tensor] = []
            source = module.fmb.dot if isinstance(module.fmb, PairMachine) else module.project
            assert source is not None
            source.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
            out = module(norm(torch.randn(8, number, 16)))
            assert 0.05 < seen[0].std() < 2.0
            assert 0.9 < out.square().mean() < 1.1


def test_plain_machine_of_one_token_is_an_error() -> None:
    with pytest.raises(ValueError, match="multiplies pairs of tokens, and there is one token"):
        layer(1, 0, machine="plain")
    with pytest.raises(ValueError, match="machine must be one of optimised, plain, attentive, got 'fast'"):
        layer(OWN, 0, machine="fast")


def test_the_model_is_layers_over_all_tokens_then_a_head() -> None:
    torch.manual_seed(0)
    spec = random_spec()
    config = Wukong.Config(dim=8, num_layers=3, rank=3, hidden=[16], head_hidden=[16], num_fmb=4, num_lcb=3)
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

"""`ikbo_rewrite`: every pattern it finds gives the same results and gradients; what it leaves, it names."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional as F

from modules import ikbo_rewrite
from tests.modules.rewrite.cases import (
    OWNER,
    REQUESTS,
    SIZES,
    Model,
    assert_same,
    copies,
    inputs,
    owner_of,
    rewritten,
    tokens,
)


def product(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.mix.weight @ tokens(user, candidate, offsets)


def linear_over_tokens(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.mix(tokens(user, candidate, offsets).transpose(1, 2)).mT


def linear_with_bias(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.biased(tokens(user, candidate, offsets).mT).relu()


def einsum(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return torch.einsum("bnd,nm->bmd", tokens(user, candidate, offsets), self.mix.weight.mT)


def interleaved(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = torch.repeat_interleave(user, offsets.diff(), dim=0, output_size=candidate.shape[0])
    return self.mix.weight @ torch.cat([candidate[:, :1], user, candidate[:, 1:]], 1)


def flat_linear(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user.index_select(0, owner_of(offsets, candidate))
    return self.flat(torch.cat([user.flatten(1), candidate.flatten(1)], dim=-1))


def flattened_tokens(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.flat(F.gelu(self.norm(tokens(user, candidate, offsets))).flatten(1))


def user_tower(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    shared = F.silu(self.dense(self.norm(user[owner_of(offsets, candidate)]))).mean(1)
    return self.dense(candidate.mean(1)) + shared * 2.0


def gate(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    shared = user[owner_of(offsets, candidate)]
    return torch.sigmoid(self.dense(shared) + shared)[:, :3] * candidate


def attention(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    key, value = self.key_value(user[owner_of(offsets, candidate)]).chunk(2, dim=-1)
    heads = [x.unflatten(-1, (2, 4)).transpose(1, 2) for x in (candidate, key, value)]
    return F.scaled_dot_product_attention(*heads, scale=0.3).transpose(1, 2).flatten(2)


def viewed_attention(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    copied, number = user[owner_of(offsets, candidate)], candidate.shape[0]
    query, key = (self.dense(x).view(number, -1, 2, 4).permute(0, 2, 1, 3) for x in (candidate, copied))
    return F.scaled_dot_product_attention(query, key, key)


def attention_by_two_owner_maps(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    key = self.dense(user)[owner_of(offsets, candidate)]
    value = user.exp()[owner_of(offsets, candidate)]
    return F.scaled_dot_product_attention(candidate[:, None], key[:, None], value[:, None])


PATTERNS = {
    product: "linear_compression",
    linear_over_tokens: "linear_compression",
    linear_with_bias: "linear_compression",
    einsum: "linear_compression",
    interleaved: "linear_compression",
    flat_linear: "jagged_dense_elementwise",
    flattened_tokens: "jagged_dense_elementwise",
    user_tower: "jagged_dense_elementwise",
    gate: "jagged_dense_elementwise",
    attention: "target_attention",
    viewed_attention: "target_attention",
    attention_by_two_owner_maps: "target_attention",
}


@pytest.mark.parametrize("body", PATTERNS, ids=lambda body: body.__name__)
def test_patterns_become_operators_with_the_same_results_and_gradients(body: Callable[..., Tensor]) -> None:
    model, graph, report = rewritten(body)
    assert [swap.after for swap in report.swapped] == [PATTERNS[body]]
    assert report.kept == []
    assert copies(graph) == []
    assert_same(model, graph, inputs())
    # Other numbers of requests and of candidates, each by itself.
    assert_same(model, graph, inputs(torch.tensor([1, 4])))
    assert_same(model, graph, inputs(torch.tensor([1, 0, 0, 1])))


def test_what_depends_on_requests_alone_runs_at_requests() -> None:
    _, graph, report = rewritten(user_tower)
    assert report.at_requests == ["layer_norm", "linear", "silu", "mean", "mul"]
    rows = {str(node.meta["val"].shape[0]) for node in graph.graph.nodes if "layer_norm" in node.name}
    (requests,) = {str(node.meta["val"].shape[0]) for node in graph.graph.nodes if node.name == "user"}
    assert rows == {requests}


def test_uniform_copies_are_found_by_shape() -> None:
    class Uniform(nn.Module):
        def forward(self, user: Tensor, weight: Tensor, candidate: Tensor) -> Tensor:
            ratio = candidate.shape[1]
            candidate = candidate.flatten(0, 1)
            expanded = user.unsqueeze(1).expand(-1, ratio, -1, -1).reshape(-1, 4, 8)
            repeated = user.unsqueeze(1).repeat(1, ratio, 1, 1).flatten(0, 1)
            by_number = user.repeat_interleave(ratio, 0)
            return weight @ torch.cat([expanded, repeated, by_number, candidate], dim=1)

    torch.manual_seed(0)
    example = tuple(torch.randn(shape).double().requires_grad_() for shape in ((3, 4, 8), (5, 15), (3, 2, 3, 8)))
    graph, report = ikbo_rewrite(
        Uniform(), example, dynamic_shapes={"user": {0: REQUESTS}, "weight": None, "candidate": {0: REQUESTS}}
    )
    assert [swap.after for swap in report.swapped] == ["linear_compression"]
    assert len(report.broadcasts) == 3
    assert copies(graph) == []
    assert_same(Uniform(), graph, example)


def test_copies_of_copies_are_one_copy() -> None:
    class Tree(nn.Module):
        def forward(
            self, user: Tensor, vendor: Tensor, ad: Tensor, weight: Tensor, vendors: Tensor, ads: Tensor
        ) -> Tensor:
            shared = torch.cat([user[owner_of(vendors, vendor)], vendor], dim=1)
            return weight @ torch.cat([shared.exp()[owner_of(ads, ad)], ad], dim=1)

    torch.manual_seed(0)
    shapes = ((2, 2, 4), (3, 1, 4), (5, 3, 4), (2, 6))
    example = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    example += [torch.tensor([0, 1, 3]), torch.tensor([0, 2, 2, 5])]
    graph, report = ikbo_rewrite(Tree(), tuple(example))
    assert [swap.after for swap in report.swapped] == ["linear_compression"]
    assert_same(Tree(), graph, tuple(example))

    class Direct(nn.Module):
        def forward(self, user: Tensor, vendors: Tensor, ads: Tensor, vendor: Tensor, ad: Tensor, w: Tensor) -> Tensor:
            return w @ torch.cat([user[owner_of(vendors, vendor)][owner_of(ads, ad)], ad], dim=1)

    user, vendor, ad, weight, vendors, ads = example
    arguments = (user, vendors, ads, vendor, ad, weight[:, :5].detach().requires_grad_())
    graph, report = ikbo_rewrite(Direct(), arguments)
    assert copies(graph) == []
    assert_same(Direct(), graph, arguments)


def test_owner_maps_that_are_inputs_need_a_word_that_they_are_sorted() -> None:
    class ByOwner(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, owner: Tensor, weight: Tensor) -> Tensor:
            return weight @ torch.cat([user[owner], candidate], dim=1)

    user, candidate, _ = inputs()
    example = (user, candidate, OWNER, torch.randn(5, 7).double().requires_grad_())
    _, report = ikbo_rewrite(ByOwner(), example)
    assert report.swapped == []
    assert "owners=('owner',) if it is sorted" in str(report)
    assert ikbo_rewrite(ByOwner(), example, owners="owner")[1].swapped
    graph, report = ikbo_rewrite(ByOwner(), example, owners=("owner",))
    assert [swap.after for swap in report.swapped] == ["linear_compression"]
    assert_same(ByOwner(), graph, example)
    with pytest.raises(ValueError, match="promised to be sorted decreases"):
        graph(user, candidate, OWNER.flip(0), example[3])
    again = export(graph, example).module()
    torch.testing.assert_close(again(*example), graph(*example))
    with pytest.raises(RuntimeError, match="promised to be sorted decreases"):
        again(user, candidate, OWNER.flip(0), example[3])
    with pytest.raises(ValueError, match=r"owners \['user_of'\] are not inputs"):
        ikbo_rewrite(ByOwner(), example, owners=("user_of",))


def test_two_dynamic_sizes_pass_through_with_their_ranges() -> None:
    model, graph, report = rewritten(product)
    (swap,) = report.swapped
    assert swap.requests.endswith("in 1..64")
    assert swap.candidates.endswith("in 1..4096")
    again = export(graph, inputs(), dynamic_shapes=tuple(SIZES.values()))
    example = inputs(torch.tensor([1, 0, 5, 2]))
    torch.testing.assert_close(again.module()(*example), model(*example))
    assert {str(limits) for limits in again.range_constraints.values()} == {"VR[1, 64]", "VR[1, 4096]", "VR[2, 65]"}


def test_a_program_for_one_request_is_made_of_an_example_with_one() -> None:
    model = Model(product)
    sizes = (None, SIZES["candidate"], None)
    graph, report = ikbo_rewrite(model, inputs(torch.tensor([3])), dynamic_shapes=sizes)
    (swap,) = report.swapped
    assert swap.requests == "1"
    assert swap.candidates.endswith("in 1..4096")
    assert_same(model, graph, inputs(torch.tensor([5])))


def test_training_the_rewritten_model_trains_the_model() -> None:
    model, graph, _ = rewritten(product)
    weight = model.mix.weight.detach().clone()
    assert graph.train().training
    graph(*inputs()).square().sum().backward()
    torch.optim.SGD(graph.parameters(), lr=0.1).step()
    assert not torch.equal(model.mix.weight, weight)


@pytest.mark.parametrize("as_program", [False, True])
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8)])
@pytest.mark.parametrize("mode", [False, True])
def test_the_other_mode_than_that_of_the_export_is_refused(mode: bool, layer: nn.Module, as_program: bool) -> None:
    class Moody(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
            return self.layer(candidate) * user[owner_of(offsets, candidate)]

    arguments = torch.randn(2, 8), torch.randn(3, 8), torch.tensor([0, 1, 3])
    model = Moody(layer).train(mode)
    graph, _ = ikbo_rewrite(export(model, arguments)) if as_program else ikbo_rewrite(model, arguments)
    assert graph.training is mode
    for same in (graph, copy.deepcopy(graph)):
        same(*arguments)
        with pytest.raises(RuntimeError, match="is called in (training|evaluation) mode; rewrite it in each mode"):
            same.train(not mode)(*arguments)
    indifferent, _ = ikbo_rewrite(Moody(nn.Dropout(0.0)).train(mode), arguments)
    indifferent.train(not mode)(*arguments)


def masked(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)][:, None]
    return F.scaled_dot_product_attention(candidate[:, None], user, user, torch.ones(3, 4, dtype=torch.bool))


def multihead(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)]
    return self.attention(candidate, user, user, need_weights=False)[0]


def dropped(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return F.dropout(user[owner_of(offsets, candidate)], 0.5) * candidate[:, :1]


def gram(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    x = tokens(self.dense(user), candidate, offsets)
    return x @ x.mT


def normalised_together(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return F.layer_norm(tokens(user, candidate, offsets), (7, 8))


def divided(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return candidate / self.dense(user[owner_of(offsets, candidate)])[:, :3].exp()


def over_candidates(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return user[owner_of(offsets, candidate)].sum(0)


def returned(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(user[owner_of(offsets, candidate)])


def unknown(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return tokens(user, candidate, offsets).cumsum(1)


KEPT = {
    masked: "mask or dropout",
    multihead: "along the rows of candidates",
    dropped: "draws a mask for every candidate",
    gram: "two values that depend on requests",
    normalised_together: "normalises over parts",
    divided: "element by element",
    over_candidates: "along the rows of candidates",
    returned: "is the result",
    unknown: "has no rule",
}


@pytest.mark.parametrize("body", KEPT, ids=lambda body: body.__name__)
def test_what_cannot_be_swapped_is_kept_and_named(body: Callable[..., Tensor]) -> None:
    model, graph, report = rewritten(body)
    assert report.swapped == []
    assert KEPT[body] in report.kept[0].reason
    assert "kept" in str(report)
    if body is not dropped:
        assert_same(model, graph, inputs())


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_followed_in_modules(need_weights: bool) -> None:
    def body(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        user = user[owner_of(offsets, candidate)]
        return self.attention(candidate, user, user, need_weights=need_weights, is_causal=False)[0]

    model = Model(body)
    graph, report = ikbo_rewrite(model, inputs(), dynamic_shapes=SIZES)
    assert [swap.after for swap in report.swapped] == ["target_attention"]
    assert copies(graph) == []
    assert_same(model, graph, inputs(torch.tensor([1, 0, 4])))
    assert "forward" not in vars(model.attention)


def test_weights_of_attention_that_are_read_are_the_modules() -> None:
    def body(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        out, weights = self.attention(candidate, candidate, candidate)
        return torch.cat([out, weights], -1)

    model = Model(body)
    graph, _ = ikbo_rewrite(model, inputs())
    assert_same(model, graph, inputs())


def test_computed_at_requests_and_copied_late() -> None:
    _, graph, report = rewritten(returned)
    assert report.at_requests == ["linear"]
    assert copies(graph) == ["expand_rows"]


def test_models_without_copies_are_left_as_they_are() -> None:
    model, graph, report = rewritten(lambda self, user, candidate, offsets: self.dense(candidate))
    assert str(report) == "broadcasts found: none\ncomputed at requests: nothing"
    assert_same(model, graph, inputs())


def test_a_module_needs_example_inputs() -> None:
    with pytest.raises(ValueError, match="needs example inputs"):
        ikbo_rewrite(nn.Linear(2, 2))

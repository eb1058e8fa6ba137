"""`ikbo_rewrite`: every pattern it finds gives the same results and gradients; what it leaves, it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.nn import functional as F

from modules import ikbo_rewrite
from modules.rewrite import Report

COUNTS = torch.tensor([2, 0, 3])
OFFSETS = torch.tensor([0, 2, 2, 5])
OWNER = torch.tensor([0, 0, 2, 2, 2])
REQUESTS, CANDIDATES = Dim("requests", min=1, max=64), Dim("candidates", min=1, max=4096)
SIZES = {"user": {0: REQUESTS}, "candidate": {0: CANDIDATES}, "offsets": {0: REQUESTS + 1}}


def owner_of(offsets: Tensor, candidate: Tensor) -> Tensor:
    requests = torch.arange(offsets.shape[0] - 1)
    return torch.repeat_interleave(requests, offsets.diff(), output_size=candidate.shape[0])


class Model(nn.Module):
    """A body on (user [R, 4, 8], candidate [C, 3, 8], offsets) with a few parameters to use."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.mix = nn.Linear(7, 5, bias=False)
        self.biased = nn.Linear(7, 5)
        self.flat = nn.Linear(56, 6)
        self.dense = nn.Linear(8, 8)
        self.key_value = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.double()

    def forward(self, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        return self.body(self, user, candidate, offsets)


def inputs(counts: Tensor = COUNTS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    candidates = int(counts.sum())
    user, candidate = torch.randn(len(counts), 4, 8).double(), torch.randn(candidates, 3, 8).double()
    return user.requires_grad_(), candidate.requires_grad_(), F.pad(counts.cumsum(0), (1, 0))


def rewritten(body: Callable[..., Tensor], **options: Any) -> tuple[Model, fx.GraphModule, Report]:
    model = Model(body)
    exported = export(model, inputs(), dynamic_shapes=SIZES)
    return model, *ikbo_rewrite(exported, **options)


def assert_same(model: nn.Module, graph: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Results and every gradient, but for the order of float64 sums."""
    leaves = [x for x in (*example, *model.parameters()) if x.is_floating_point()]
    results = []
    for module in (model, graph):
        out = module(*example)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).double()
        results.append((out, *torch.autograd.grad(out, leaves, cotangent, allow_unused=True)))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)


def copies(graph: fx.GraphModule) -> list[str]:
    """Operators of a graph that copy rows."""
    names = ("index.Tensor", "index_select", "expand", "repeat")
    called = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    return [name for name in called if name.startswith(names)]


def tokens(user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([user[owner_of(offsets, candidate)], candidate], dim=1)


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
    graph, report = ikbo_rewrite(ByOwner(), example, owners=("owner",))
    assert [swap.after for swap in report.swapped] == ["linear_compression"]
    assert_same(ByOwner(), graph, example)
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


def test_training_the_rewritten_model_trains_the_model() -> None:
    model, graph, _ = rewritten(product)
    weight = model.mix.weight.detach().clone()
    assert graph.train().training
    graph(*inputs()).square().sum().backward()
    torch.optim.SGD(graph.parameters(), lr=0.1).step()
    assert not torch.equal(model.mix.weight, weight)


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


def written_through_a_view(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)] * 2.0
    user[:, 0] = 0.0
    return self.mix.weight @ torch.cat([user, candidate], 1)


def viewed_before_a_write(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)]
    view = torch.einsum("bnd->bdn", user).mT[:, :3]
    user.mul_(2.0)
    return view * candidate


def source_written(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user.clone()
    copied = user[owner_of(offsets, candidate)]
    user.zero_()
    return self.mix.weight @ torch.cat([copied, candidate], 1)


def written_in_a_region(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)] * 2.0
    view = user[:, :3]
    with torch.no_grad():
        user.clamp_(0.0)
    return view + candidate


def equal_results_of_which_one_is_written(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    x = tokens(user, candidate, offsets)
    first, second = self.mix.weight @ x, self.mix.weight @ x
    first[:, 0] = 0.0
    return torch.cat([first, second], 1)


def equal_calls_around_a_write(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    candidate = candidate.clone()
    before = candidate.neg()
    candidate[:, 0] = 0.0
    return before - candidate.neg()


def written_and_read(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)] + 1.0
    return user.relu_()[:, :3] + user[:, 1:] * candidate


def written_in_its_own_dtype(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return candidate.float().neg().add_(self.dense.bias).double()


def tokens_as_rows(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return tokens(user, candidate, offsets).reshape(-1, 8).mean(1)


def flattened_before_the_split(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)].unflatten(1, (2, 2))
    return torch.cat([user, candidate[:, :1, None].expand(-1, 2, 2, -1)], 3).flatten(1, 2) * 2.0


def scalars_of_two_types(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    numbers = (user * 3).long()[owner_of(offsets, candidate)]
    return self.dense(torch.cat([numbers * 2, (numbers * 2.0).to(torch.float32) / 3], 1).double())


def parts_of_two_dtypes(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([user.float()[owner_of(offsets, candidate)], candidate], 1).exp()


def diagonal(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return torch.einsum("bnd,nn->bnd", tokens(user, candidate, offsets), self.dense.weight[:7, :7])


def one_query_for_all(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate)][:, None]
    return F.scaled_dot_product_attention(self.dense.weight[None, None, :2], user, user)


def one_count_for_all(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(torch.repeat_interleave(user, offsets[1:2], dim=0))


def tokens_expanded_too(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(user[:, :1].unsqueeze(1).expand(-1, 2, 4, -1).flatten(0, 1))


def mean_of_all(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return user[owner_of(offsets, candidate)].mean(dim=[]) + candidate


def counted_by_data(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    copied = torch.repeat_interleave(user, offsets.diff(), dim=0)
    return copied.cumsum(0) @ copied.mT


def gathered_again(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(user[owner_of(offsets, candidate)])[candidate[:, 0, 0].argsort()]


LOOKALIKES = (
    *(written_through_a_view, viewed_before_a_write, source_written, written_in_a_region),
    *(equal_results_of_which_one_is_written, equal_calls_around_a_write, written_and_read),
    *(written_in_its_own_dtype, tokens_as_rows),
    *(flattened_before_the_split, scalars_of_two_types, parts_of_two_dtypes, diagonal, one_query_for_all),
    *(one_count_for_all, tokens_expanded_too, mean_of_all, counted_by_data, gathered_again),
)


@pytest.mark.parametrize("body", LOOKALIKES, ids=lambda body: body.__name__)
def test_what_only_looks_like_a_pattern_computes_the_same(body: Callable[..., Tensor]) -> None:
    model, graph, _ = rewritten(body)
    # Sums over candidates are rounded elsewhere, which float64 alone hides.
    several = (COUNTS, torch.tensor([1, 4]))
    for counts in (torch.tensor([1, 0, 1]),) if body is parts_of_two_dtypes else several:
        assert_same(model, graph, inputs(counts))


def test_equal_calls_that_draw_random_numbers_stay_apart() -> None:
    def body(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        return F.dropout(candidate, 0.5) - F.dropout(candidate, 0.5)

    _, graph, _ = rewritten(body)
    assert graph(*inputs()).any()


def rows_by_minus_one(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user.mT[owner_of(offsets, candidate)].reshape(-1, 32)
    return self.mix.weight @ torch.cat([user.unflatten(1, (4, 8)), candidate], 1)


def casts(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user[owner_of(offsets, candidate).to(torch.int32)].relu().to(torch.float64)
    return self.mix.weight @ torch.cat([user, candidate], 1)


def negative_dimensions(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = user.repeat_interleave(offsets.diff(), dim=-3, output_size=candidate.shape[0])
    return (self.mix.weight @ torch.cat([user, candidate], -2)).relu_()


def activated_in_place(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    user = self.dense(user[owner_of(offsets, candidate)])
    user *= 2.0
    user = F.dropout(F.relu(user, inplace=True) - 1.0, 0.5, training=False)
    user = F.leaky_relu(user, inplace=True)
    return self.mix.weight @ torch.cat([user, candidate], 1)


COPIED_BY = (rows_by_minus_one, casts, negative_dimensions, activated_in_place)


@pytest.mark.parametrize("body", COPIED_BY, ids=lambda body: body.__name__)
def test_ways_to_write_a_copy_do_not_hide_it(body: Callable[..., Tensor]) -> None:
    model, graph, report = rewritten(body)
    assert [swap.after for swap in report.swapped] == ["linear_compression"]
    assert report.kept == []
    assert_same(model, graph, inputs())
    assert [name for name in copies(graph) if name != "repeat_interleave.self_Tensor"] == []


def test_regions_and_unknown_orders_are_named() -> None:
    def region(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
        with torch.no_grad():
            return self.mix.weight @ tokens(user, candidate, offsets)

    _, _, report = rewritten(region)
    assert "a graph of its own" in report.kept[0].reason
    _, _, report = rewritten(gathered_again)
    assert "order that is not known" in str(report)
    _, _, report = rewritten(source_written)
    assert "writes in place" in str(report)


def merged_with_tokens(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(user.unsqueeze(1).expand(-1, 2, -1, -1).flatten(0, 2))


def repeated_within_rows(self: Model, user: Tensor, candidate: Tensor, offsets: Tensor) -> Tensor:
    return self.dense(user.unsqueeze(1).repeat(1, 2, 1, 1).flatten(1, 2))


@pytest.mark.parametrize("body", [tokens_expanded_too, merged_with_tokens], ids=lambda body: body.__name__)
def test_copies_along_further_dimensions_are_named(body: Callable[..., Tensor]) -> None:
    model, graph, report = rewritten(body)
    assert [kept.reason for kept in report.kept] == ["copies rows, and repeats or merges other dimensions as well"]
    assert_same(model, graph, inputs())
    assert rewritten(repeated_within_rows)[2].kept == []


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

"""What only looks like a broadcast, or hides one, for `ikbo_rewrite`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.modules.rewrite.cases import COUNTS, Model, assert_same, copies, inputs, owner_of, rewritten, tokens


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

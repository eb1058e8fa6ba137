"""Token mixing against its equations on padded tensors, its published ablations, and what is its own."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.costs.summary import summarise
from modules.layers.feed_forward import token_linear
from modules.layers.feed_forward.token_linear import TokenFeedForward
from modules.layers.moe import MoE
from modules.layers.sequence.newest import newest
from modules.models import build
from modules.models.token_mixing import SparseConfig, TokenMixing, TokenMixingConfig
from modules.models.token_mixing.sequences import EventEncoding, Events
from modules.models.token_mixing.tokens import GlobalTokens, SideTokens, even_groups
from modules.precision import apply_recipe
from tests.modules.factories import random_batch, random_spec
from tests.modules.models.test_models import TOKEN_MIXING, Ranking, double, double_model
from tests.modules.padded import norm
from train.commands.doctor import ROOT
from train.config.compose import to_config
from train.config.files import composed

MODELS = ("rankmixer", "tokenmixer", "hyformer", "mixformer")
SPEC = random_spec()


class Padded:
    """The model on T tokens of every candidate, [C, T, D], zeros where item tokens would reach user tokens."""

    def __init__(self, model: TokenMixing) -> None:
        self.model, self.config = model, model.config
        self.user, self.pre = self.config.of_user * self.config.one_way, self.config.norm == "pre"

    def mix(self, x: Tensor) -> Tensor:
        slices = x.unflatten(2, (x.shape[1], -1)).transpose(1, 2).clone()
        slices[:, : self.user, self.user :] = 0
        return slices.flatten(2)

    def sparse(self, layer: Any, z: Tensor) -> Tensor:
        experts, gates = layer.moe.experts, layer.moe.router.gate.weight.view(z.shape[1], -1, z.shape[2])
        scores = torch.einsum("cti,tei->cte", z, gates).softmax(2)
        chosen = scores * (scores >= scores.topk(layer.moe.router.top_k).values[..., -1:])
        w_in, w_out = (each.unflatten(0, gates.shape[:2]) for each in (experts.w_gate_up, experts.w_down))
        gate, up = torch.einsum("cti,teoi->cteo", z, w_in).chunk(2, 3)
        y = torch.einsum("cte,cteo,teio->cti", chosen, F.silu(gate) * up, w_out)
        return (layer.alpha * y + self.network(layer.shared, z, False))[..., -layer.out_dim :]

    def network(self, layer: Any, z: Tensor, normalize: bool) -> Tensor:
        if hasattr(layer, "moe"):
            width = z.shape[2] if z.shape[1] > self.user else z.shape[2] * self.user // self.config.num_tokens
            z = norm(z[..., :width]) if normalize else z
            return self.sparse(layer, F.pad(z, (0, layer.dim - z.shape[2])))
        z, tokens = z[..., : layer.w_in.shape[2]], z.shape[1]
        hidden = torch.einsum("cti,toi->cto", norm(z) if normalize else z, layer.w_in)
        hidden = hidden if layer.b_in is None else hidden + layer.b_in.view(tokens, -1)
        gate, up = hidden.chunk(2, 2) if layer.activation == "swiglu" else (hidden, None)
        hidden = F.gelu(hidden) if up is None else F.silu(gate) * up
        y = torch.einsum("cti,toi->cto", hidden, layer.w_out)
        return y if layer.b_out is None else y + layer.b_out.view(tokens, -1)

    def networks(self, layer: Any, z: Tensor, normalize: bool = False) -> Tensor:
        item = self.network(layer.item, z[:, self.user :], normalize)
        if layer.user is None:
            return item
        item = F.pad(item, (z.shape[2] - item.shape[2], 0)) if item.shape[2] < self.config.token_dim else item
        return torch.cat([self.network(layer.user, z[:, : self.user], normalize), item], 1)

    def block(self, block: Any, x: Tensor) -> Tensor:
        first, then = (norm, lambda x: x) if self.pre else (lambda x: x, norm)
        if block.mixing == "add":
            s = then(x + self.mix(first(x)))
            return then(s + self.networks(block.ffn, first(s)))
        if block.mixing == "boost":
            return then(x + self.networks(block.ffn, self.mix(first(x))))
        mixed = self.mix(x)
        h = mixed + self.networks(block.inner, mixed, self.pre)
        return x + self.networks(block.ffn, self.mix(h), self.pre)

    def attend(self, layer: Any, x: Tensor, events: Tensor, there: Tensor, heads: int, query: Tensor) -> Tensor:
        """query [C, S, H, d] to events [C, L, D]."""
        key, value = layer.key_value(events).unflatten(2, (2, heads, -1)).unbind(2)
        scores = torch.einsum("cshd,clhd->cshl", query, key) * key.shape[3] ** -0.5
        weights = scores.masked_fill(~there[:, None, None], -torch.inf).softmax(3).nan_to_num(0)
        return torch.einsum("cshl,clhd->cshd", weights, value)

    def __call__(self, tokens: Any, batch: Any) -> Tensor:
        model, config, owner = self.model, self.config, batch.owner
        user, item = model.tokeniser(tokens, CandidateRows.of(batch))
        x = item if user is None else torch.cat([user[owner], item], 1)
        sequences = [] if model.event_tokens is None else model.event_tokens(tokens.histories)
        padded = [_padded(each.values, each.offsets) for each in sequences]
        events, there = [each[owner] for each, _ in padded], [mask[owner] for _, mask in padded]
        earlier = x
        for index, layer in enumerate(model.layers):
            if config.sequences == "queries":
                for n, (encoding, decoding) in enumerate(zip(layer.encodings, layer.attend, strict=True)):
                    events[n] = events[n] + encoding.swiglu(norm(events[n]))
                    for place in {n, self.user + n}:
                        q = decoding.query(x[:, place]).unflatten(1, (1, config.num_heads, -1))
                        made = self.attend(decoding, x, events[n], there[n], config.num_heads, q)
                        x = torch.cat([x[:, :place], decoding.output(made.flatten(2)), x[:, place + 1 :]], 1)
            x = self.block(layer.block, x)
            if config.sequences == "heads":
                z = [norm(x)]
                for n, head in enumerate(layer.attend):
                    weight = head.item.weight if head.user is None else torch.cat([head.user.weight, head.item.weight])
                    q = torch.einsum("cti,toi->cto", z[0], weight)[:, None]
                    z.append(self.attend(head, x, layer.swiglu.swiglu(norm(events[n])), there[n], x.shape[1], q)[:, 0])
                x = x + self.networks(layer.output, torch.cat(z, 2))
            if config.interval and (index + 1) % config.interval == 0 and index + 1 < len(model.layers):
                earlier = x = x + earlier
        return model.heads(norm(x).mean(1))


@pytest.mark.parametrize("of_newest", [False, True])
def test_the_newest_events_attend_to_all_and_go_on(of_newest: bool) -> None:
    """In the first layer, and where the layer before kept the newest as well."""
    config = published("hyformer", encoding="newest", num_newest=2)
    first, layer = (EventEncoding(config, length).double() for length in (6, 2 if of_newest else 6))
    events = Events(torch.randn(9, 16, dtype=torch.float64), torch.tensor([0, 5, 5, 6, 9]))
    events = first(events, 4) if of_newest else events
    made, heads = layer(events, 4), lambda x: x.unflatten(1, (config.num_heads, -1)).transpose(0, 1)
    for row, length in enumerate((2, 0, 1, 2)):
        own = events.values[events.offsets[row] : events.offsets[row + 1]]
        key, value = layer.key_value(norm(own)).chunk(2, 1)
        query = layer.query(norm(own)[-2:])
        attended = F.scaled_dot_product_attention(*map(heads, (query, key, value))).transpose(0, 1).flatten(1)
        kept = own[-2:] + layer.output(attended)
        expected = kept + layer.swiglu(norm(kept))
        assert len(expected) == length
        torch.testing.assert_close(made.values[made.offsets[row] : made.offsets[row + 1]], expected)


def _padded(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    rows = [values[first:last] for first, last in pairwise(offsets.tolist())]
    mask = torch.arange(max(map(len, rows)))[None] < offsets.diff()[:, None]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), mask


@functools.cache
def shipped(name: str) -> TokenMixingConfig:
    config = to_config(composed([f"model={name}"])).model
    assert isinstance(config, TokenMixingConfig)
    return config


def published(name: str, **changes: Any) -> TokenMixingConfig:
    """The configuration of a published model, of small sizes."""
    return dataclasses.replace(shipped(name), **TOKEN_MIXING | changes)


@pytest.mark.parametrize("one_way", [True, False], ids=["one way", "all ways"])
@pytest.mark.parametrize("name", [*MODELS, "tokenmixer, networks of one operator", "tokenmixer, sparse experts"])
def test_a_published_model_is_its_equations_on_padded_tensors(
    monkeypatch: pytest.MonkeyPatch, name: str, one_way: bool
) -> None:
    name, _, form = name.partition(", ")
    fused = form.startswith("networks")
    config = published(name, one_way=one_way, num_layers=3, user_tokens=3, bias=not fused)
    if form == "sparse experts":
        config = dataclasses.replace(config, feed_forward="moe", moe=SparseConfig(num_experts=3, top_k=2))
    if fused:
        monkeypatch.setattr(token_linear, "is_fused", lambda *_: True)  # as on Hopper
    model, batch = double_model(config, SPEC), double(random_batch(SPEC, (2, 0, 3), (5, 2, 0)))
    tokens = model.embedding(batch)
    actual, expected = model.arch(tokens, batch), Padded(model.arch)(tokens, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    parameters = [p for p in model.arch.parameters() if p.requires_grad]
    cotangent = torch.randn_like(actual)
    made = [torch.autograd.grad(y, parameters, cotangent, allow_unused=True) for y in (actual, expected)]
    for (parameter, _), a, b in zip(model.arch.named_parameters(), *made, strict=True):
        if "lower_heads" not in parameter:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11, msg=lambda text, name=parameter: f"{name}: {text}")


def ablations() -> list[tuple[str, list[str]]]:
    """(model, overrides) of the rows of the page's table of ablations; those of one cell are tried one by one, unless
    `with` joins them. Rows of experts come with `model.feed_forward=moe`."""
    found, name, always = [], "", []
    for line in (ROOT / "docs" / "token_mixing.md").read_text().partition("## Ablations")[2].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and "=" in cells[2]:
            if cells[0]:
                always = ["model.feed_forward=moe"] * ("experts" in cells[0])
                name = name if always else cells[0].lower().removesuffix("-large")
            alone, _, joined = cells[2].partition(" with ")
            found += [(name, [*always, each]) for each in re.findall(r"`(.*?)`", alone)]
            found[-1][1].extend(re.findall(r"`(.*?)`", joined))
    return found


SPARSE: list[dict[str, Any]] = [{"shared_expert": False}, {"alpha": 1.0}, {"top_k": 2}, {"num_experts": 2}]


def seen(name: str, overrides: list[str]) -> tuple[Tensor, ...]:
    """Logits in training, and those of lower blocks."""
    config = copy.deepcopy(published(name, num_layers=3, num_newest=2))
    for key, value in (override.split("=") for override in overrides):
        section, _, field = key.removeprefix("model.").rpartition(".")
        setattr(getattr(config, section) if section else config, field, yaml.safe_load(value))
    model, batch = Ranking(config, SPEC), random_batch(SPEC, (2, 0, 3), (5, 2, 4))
    return model(batch).detach(), *(logits.detach() for _, logits in model.arch.take_lower())


@pytest.mark.parametrize(("name", "overrides"), ablations(), ids=str)
def test_a_published_ablation_is_one_override(name: str, overrides: list[str]) -> None:
    whole, ablated = (seen(name, each) for each in (overrides[:-1] * ("moe" in overrides[0]), overrides))
    assert len(whole) != len(ablated) or not torch.allclose(torch.stack(whole), torch.stack(ablated), atol=1e-5)


def test_the_page_has_the_ablations_of_all_models() -> None:
    assert {name: sum(name == other for other, _ in ablations()) for name in MODELS} == {
        "rankmixer": 3, "tokenmixer": 11, "hyformer": 6, "mixformer": 7,
    }  # fmt: skip


@pytest.mark.parametrize("change", [{}, *SPARSE, {"without": ["token_networks"]}], ids=str)
def test_sparse_experts_of_a_token_are_its_own(change: dict[str, Any]) -> None:
    without = change.get("without", [])
    per_token = not without
    sparse = SparseConfig(**{key: value for key, value in change.items() if key != "without"})
    config = published("tokenmixer", feed_forward="moe", moe=sparse, without=without)
    model = Ranking(config, SPEC)
    layers = [module for module in model.arch.modules() if isinstance(module, MoE)]
    kinds = 4 if per_token else 1
    assert [layer.router.num_experts for layer in layers] == [sparse.num_experts * kinds] * len(layers)
    seen: list[Any] = []
    for layer in layers:
        layer.router.register_forward_hook(lambda module, args, routing: seen.append(routing))
    logits = model(random_batch(SPEC))
    assert len(seen) == len(layers) == 2 * 2 * 3
    for routing in seen:
        if per_token:
            kind = torch.arange(routing.selected_experts.shape[0]) % 4
            assert torch.equal(routing.selected_experts // sparse.num_experts, kind[:, None].expand(-1, sparse.top_k))
        torch.testing.assert_close(routing.scores.sum(1), torch.ones(routing.scores.shape[0]))
    if change:
        assert not torch.allclose(
            logits, Ranking(published("tokenmixer", feed_forward="moe"), SPEC)(random_batch(SPEC))
        )


def test_the_summary_says_at_which_rows_tokens_run() -> None:
    for one_way, said in ((True, "4 tokens run at the rows of requests"), (False, "all 8 tokens run at the rows of")):
        config = published("rankmixer", one_way=one_way)
        summary = summarise(build(config, SPEC), SPEC, config.dim, notes=config.notes())
        assert said in str(summary).splitlines()[-1]


def test_logits_of_lower_blocks_are_made_in_training_only() -> None:
    model, batch = Ranking(published("tokenmixer"), SPEC), random_batch(SPEC)
    logits = model(batch)
    lower = model.arch.take_lower()
    assert [(weight, each.shape) for weight, each in lower] == [(0.1, logits.shape)] * 2
    sum(weight * each.square().sum() for weight, each in lower).backward()
    assert all(p.grad.any() for p in model.arch.lower_heads.parameters())
    assert model.arch.take_lower() == []
    model.eval()(batch)
    assert model.arch.take_lower() == []


def test_groups_are_named_and_partition_the_features_of_each_side() -> None:
    groups = [["user", "event0.item"], ["request_dense"], ["event0.tag", "event1.item", "event1.tag"]]
    of_item = [["item", "candidate_dense"], ["tags"]]
    config = published("rankmixer", sequences="mean", groups=groups + of_item, num_tokens=4, user_tokens=2)
    with pytest.raises(ValueError, match="3 groups of requests' and 2 of candidates' features; .* are 2 and 2 tokens"):
        build(config, SPEC)
    config = dataclasses.replace(config, num_tokens=5, user_tokens=3, token_dim=20)
    assert build(config, SPEC).tokeniser.item.groups == [[0, 2], [1]]
    for wrong, said in (
        ([["user", "nobody"]], "model.groups names 'nobody'"),
        ([[*groups[0], "item"], *groups[1:], ["candidate_dense"], ["tags"]], "mixes features of requests"),
        (groups + of_item[:1], "'tags' is named 0 times"),
        ([*groups, *of_item, ["user"]], "'user' is named 2 times"),
    ):
        with pytest.raises(ValueError, match=said):
            build(dataclasses.replace(config, groups=wrong), SPEC)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_dim": 20}, "model.token_dim=20 must be a multiple of model.num_tokens=8"),
        ({"user_tokens": 8}, "model.user_tokens=8 must be below"),
        ({"num_heads": 3}, "must be a multiple of 2 . model.num_heads=6"),
        ({"without": ["request_in_queries"]}, "use model.one_way=false"),
        ({"without": ["means_in_queries"]}, "takes nothing out of .* use model.sequences=queries"),
        ({"without": ["residuals", "layer_networks"]}, "takes nothing out of .* use model.sequences=heads"),
        ({"sequences": "queries", "num_queries": 2}, "num_tokens=10 with"),
        ({"sequences": "heads", "feed_forward": "moe"}, "use model.feed_forward=swiglu"),
    ],
)
def test_what_does_not_fit_together_names_a_key_and_a_value(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(dataclasses.replace(TokenMixingConfig(**TOKEN_MIXING), **change), SPEC)


@pytest.mark.parametrize(("per_token", "bias"), [(True, True), (False, True), (True, False)])
def test_layers_of_tokens_are_quantised_by_name(per_token: bool, bias: bool) -> None:
    torch.manual_seed(0)
    without = [] if per_token else ["token_networks"]
    config = published("tokenmixer", token_dim=64, dim=32, without=without, bias=bias, expansion=1.0)
    model, batch = Ranking(config, SPEC), random_batch(SPEC)
    before = model(batch)
    rows = apply_recipe(model, "mxfp8", ["arch.layers.*.block.*"])
    quantised = [row for row in rows if row.recipe == "mxfp8"]
    assert {row.kind for row in quantised} == {"TokenFeedForward"}
    assert len(quantised) == 3 * 2 * 2  # two networks of both sides
    after = model(batch)
    assert 0 < (after - before).abs().max() < 0.1
    after.sum().backward()
    layers = [layer for layer in model.modules() if isinstance(layer, TokenFeedForward)]
    assert all(layer.w_in.grad.any() and layer.w_out.grad.any() for layer in layers)
    assert layers[0].execution().startswith("reference: operands dequantised")


@pytest.mark.parametrize("count", [1, 2, 4, 9])
@pytest.mark.parametrize("newest_first", [True, False])
def test_the_newest_of_each_row_and_spare_rows_within_limits(count: int, newest_first: bool) -> None:
    offsets, values = torch.tensor([0, 7, 7, 9, 12]), torch.arange(12)
    index, cuts = newest(offsets, 12, count, newest_first=newest_first)
    assert len(index) == min(12, 4 * count) == cuts[-1]
    assert cuts.diff().max() <= max(count, 1)
    for row, length in enumerate((7, 0, 2, 3)):
        own = values[offsets[row] : offsets[row + 1]]
        kept = own[:count] if newest_first else own[max(0, length - count) :]
        assert torch.equal(values[index][cuts[row] : cuts[row + 1]], kept)
    index, cuts = newest(torch.zeros(3, dtype=torch.int64), 0, count)
    assert (len(index), cuts.tolist()) == (0, [0] * 5)


@pytest.mark.parametrize("groups", [[[0, 3], [1], [2]], even_groups(4, 3), even_groups(4, 6), None], ids=str)
def test_a_token_is_a_linear_layer_of_its_group_or_slice(groups: list[list[int]] | None) -> None:
    torch.manual_seed(0)
    features, count = torch.randn(5, 4, 6, dtype=torch.float64), 3 if groups is None else len(groups)
    side = SideTokens(4, 6, count, 8, groups).double()
    for token in range(count):
        own = features.flatten(1)[:, 8 * token : 8 * token + 8] if groups is None else features[:, groups[token]]
        weight, bias = side.linear.weight[token], side.linear.bias.view(count, -1)[token]
        expected = own.flatten(1) @ weight[:, : own.flatten(1).shape[1]].T + bias
        torch.testing.assert_close(side(features)[:, token], expected)
    assert even_groups(4, 3) == [[0], [1], [2, 3]]
    assert even_groups(2, 3) == [[0], [0], [1]]


def test_a_global_token_is_an_mlp_of_all_features_and_reads_the_request_once() -> None:
    torch.manual_seed(0)
    layer, rows = GlobalTokens(6, 4, 2, 8).double(), CandidateRows.of_offsets(torch.tensor([0, 2, 2, 5]), 5)
    candidate, request = torch.randn(5, 6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    weight = torch.cat([layer.first.own.weight, layer.first.shared.weight], 1)
    both = torch.cat([candidate, request[rows.owner]], 1)
    hidden = F.silu(both @ weight.T + layer.first.own.bias).unflatten(1, (2, 8))
    expected = torch.einsum("cti,toi->cto", hidden, layer.second.weight) + layer.second.bias.view(2, 8)
    torch.testing.assert_close(layer(candidate, request, rows), expected)

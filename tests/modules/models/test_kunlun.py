"""Kunlun against its equations written out on padded tensors, and each ablation and per-type key by what it changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from modules.batch import RequestBatch
from modules.costs.flops import count_flops
from modules.layers.attention.gdpa import GDPAConfig
from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
from modules.layers.interaction.wukong import WukongConfig, WukongExperts
from modules.models import build
from modules.models.kunlun import Kunlun, KunlunConfig
from modules.models.kunlun.config import TIME_SCALE, stack_layers, works_of
from modules.models.kunlun.stack import EventLayer, EventStack
from tests.modules import padded
from tests.modules.factories import random_batch, random_spec

DIM = 8
SMALL: dict[str, Any] = {
    "dim": DIM,
    "wukong": WukongConfig(rank=3),
    "interaction_hidden": [16],
    "head_hidden": [16],
    "pffn_hidden": 6,
    "num_seeds": 5,
    "num_tokens": 3,
    "window": 2,
}


def kunlun(**changes: Any) -> tuple[Kunlun, FeatureEmbedding]:
    torch.manual_seed(0)
    spec = random_spec()
    return Kunlun(spec, KunlunConfig(**SMALL | changes)), FeatureEmbedding(spec, DIM, "cpu")


Events = tuple[Tensor, Tensor, dict[int, Tensor]]


class Padded:
    """Every equation of docs/kunlun.md on tensors [C, longest, d], a copy of a request's for each candidate."""

    def __init__(self, model: Kunlun, tokens: Tokens, batch: RequestBatch) -> None:
        self.model = model
        self.owner = batch.owner
        self.x = padded.norm(tokens.candidate)
        self.request = padded.norm(tokens.request)[self.owner]
        self.tokens, self.batch = tokens, batch

    def logits(self) -> Tensor:
        stacks = self.model.stacks
        sequences = [self.begin(stack) for stack in stacks]
        summaries: list[Tensor | None] = [None] * len(stacks)
        targets: list[Tensor | None] = [None] * len(stacks)
        x = torch.cat([self.request, self.x], 1)
        for index, layer in enumerate(self.model.layers):
            known = [each for each in summaries if each is not None]
            mixed = torch.cat([self.request, *known], 1)
            context = None if layer.context is None else padded.norm(layer.context.candidate.weight @ mixed)
            asked = None if layer.queries is None else padded.norm(padded.weight_of(layer.queries) @ x)
            at = 0
            for number, stack in enumerate(stacks):
                if index >= len(stack.layers):
                    continue
                block = stack.layers[index]
                queries = None
                if block.num_target:
                    assert asked is not None
                    queries = asked[:, at : at + block.num_target]
                    at += block.num_target
                sequences[number], target, summary = self.block(block, sequences[number], context, queries)
                targets[number] = targets[number] if target is None else target
                summaries[number] = summaries[number] if summary is None else summary
            own = [padded.norm(padded.weight_of(layer.summary) @ x), *(each for each in targets if each is not None)]
            shared = [each for each in summaries if each is not None]
            x = self.experts(layer.experts, torch.cat(own, 1), torch.cat(shared, 1))
        return self.model.heads(x.flatten(1))

    def begin(self, stack: EventStack) -> Events:
        """Values [C, L, d_e], which of them exist [C, L], angles [C, L, d_h / 2] by d_h."""
        (event,) = stack.events
        history = self.tokens.histories[event.name]
        rows = [slice(*history.offsets[row : row + 2].tolist()) for row in self.owner.tolist()]
        longest = event.max_length
        values = torch.zeros(len(rows), longest, stack.config.dim)
        exists = torch.zeros(len(rows), longest, dtype=torch.bool)
        turned = {layer.head_dim: torch.zeros(len(rows), longest, layer.head_dim // 2) for layer in stack.layers}
        masked = stack.masks[0](history.values)
        for index, row in enumerate(rows):
            count = row.stop - row.start
            values[index, :count], exists[index, :count] = masked[row], True
            age = -history.times[row].float()
            place = torch.arange(count, 0, -1)
            for head_dim, angles in turned.items():
                half = head_dim // 2
                of_time = half // 2 if stack.config.rotation == "time" else 0
                of_place = half - of_time
                frequency = 10_000.0 ** (-torch.arange(of_place) / of_place)
                angles[index, :count, :of_place] = place[:, None] * frequency
                frequency = 100.0 ** (-torch.arange(of_time) / max(1, of_time))
                angles[index, :count, of_place:] = torch.log(1 + age / TIME_SCALE)[:, None] * frequency
        return values, exists, turned

    def block(
        self,
        block: EventLayer,
        sequence: Events,
        context: Tensor | None,
        queries: Tensor | None,
    ) -> tuple[Events, Tensor | None, Tensor | None]:
        s, exists, turned = sequence
        angles = turned[block.head_dim]
        target = summary = None
        if block.pffn is not None:
            assert context is not None
            s = padded.block(block.pffn.attention, s, block.context(context))
        if block.attention is not None:
            attention, number, normed = block.attention, block.attention.num_heads, padded.norm(s)
            index = torch.arange(s.shape[1])
            window = s.shape[1] if block.window is None else block.window
            seen = ((index[:, None] - index).abs() <= window) & exists[:, None, :]
            if block.num_target:
                q, (k, v) = attention.query(normed), attention.key_value(normed).chunk(2, -1)
            else:
                q, k, v = attention.query_key_value(normed).chunk(3, -1)
            q, k = padded.turned(padded.heads(q, number), angles), padded.turned(padded.heads(k, number), angles)
            change = attention.output(padded.softmax_attention(q, k, padded.heads(v, number), seen))
            if queries is not None:
                asked = padded.heads(attention.target_query(block.seeds + block.target_input(queries)), number)
                everything = exists[:, None, :].expand(-1, queries.shape[1], -1)
                attended = padded.softmax_attention(asked, k, padded.heads(v, number), everything)
                target = padded.norm(block.target_output(attention.target_output(attended)))
            s = s + change
        if block.pooling is not None:
            pooling, number = block.pooling, block.pooling.num_heads
            k, v = pooling.key_value(padded.norm(s)).chunk(2, -1)
            q = padded.heads(pooling.query(padded.norm(pooling.seeds)), number).expand(len(s), -1, -1, -1)
            seen = exists[:, None, :].expand(-1, len(pooling.seeds), -1)
            seeds = padded.softmax_attention(q, padded.heads(k, number), padded.heads(v, number), seen)
            summary = padded.norm(pooling.compress(seeds))
        return (s, exists, turned), target, summary

    def experts(self, experts: WukongExperts, own: Tensor, shared: Tensor) -> Tensor:
        made = []
        for index, (first, *rest) in enumerate(experts.experts):
            number = len(experts.experts)
            tokens = torch.cat([shared[:, index::number], own[:, index::number]], 1)
            for layer in (first, *rest):
                tokens = padded.wukong(layer, tokens)
            made.append(tokens)
        return torch.cat(made, 1)


MIXED: list[dict[str, Any]] = [
    {"num_context": 3, "pffn_hidden": 5, "num_tokens": 2, "num_experts": 3, "num_seeds": 4},
    {"num_target": 3, "num_heads": 1, "num_summary": 4, "wukong": {"num_fmb": 2}},
    {"num_heads": 2, "num_tokens": 2},
    {"num_target": 0, "window": 1, "pooling": "pma"},
]
OWN = {"event1": {"dim": 16, "num_heads": 4, "num_tokens": 2, "num_seeds": 3, "window": 1, "pffn_hidden": 4}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"comp_skip": False, "num_experts": 1},
        {"rotation": "position", "window": 0, "num_layers": 3},
        {"events": OWN, "num_layers": 3, "num_experts": 3},
        {"events": {"event0": {"num_layers": 2}}, "num_layers": 4, "pooling": "pma"},
        {"layers": MIXED, "events": {"event1": {"layers": [{"num_tokens": 4}, {"num_target": 0}]}}},
    ],
    ids=["defaults", "all in each layer", "positions", "own widths", "own depth", "own layers"],
)
def test_equals_the_equations_on_padded_tensors(changes: dict[str, Any]) -> None:
    model, embedding = kunlun(**changes)
    batch = random_batch(random_spec(), (2, 0, 1, 3, 1))
    tokens = embedding(batch)
    expected = Padded(model, tokens, batch).logits()
    # Float32 sums in another order, on logits near 1.
    torch.testing.assert_close(model(tokens, batch), expected, atol=1e-5, rtol=1e-4)


def test_comp_skip_alternates_and_the_last_layer_pools() -> None:
    config = KunlunConfig(**SMALL, num_layers=4)
    works = works_of(stack_layers(config))
    assert [work.pffn for work in works] == [True, False, True, False]
    assert [work.attention for work in works] == [False, True, False, True]
    assert [work.pooling for work in works] == [True, False, True, True]
    assert all(all(work) for work in works_of(stack_layers(dataclasses.replace(config, comp_skip=False))))
    of_three = works_of(stack_layers(dataclasses.replace(config, events={"event1": {"num_layers": 3}}), "event1"))
    assert [work.attention for work in of_three] == [False, True, False]


def test_a_key_is_that_of_the_types_layer_then_the_type_then_the_layer_then_the_model() -> None:
    config = KunlunConfig(
        **SMALL | {"window": 1},
        layers=[{"window": 2, "num_seeds": 2}, {"window": 3, "pffn_gdpa": {"activation": "silu"}}, {}, {}],
        events={
            "event0": {"window": 4, "layers": [{}, {"window": 5, "pooling": "pma"}, {}]},
            "event1": {"num_layers": 2, "dim": 16},
        },
    )
    own, short, other = (stack_layers(config, name) for name in ("event0", "event1", "event2"))
    assert [layer.window for layer in own] == [4, 5, 4]
    assert [layer.window for layer in short] == [2, 3]
    assert [layer.window for layer in other] == [2, 3, 1, 1]
    assert [layer.num_seeds for layer in own] == [2, 5, 5]
    assert [layer.pooling for layer in own] == ["hsp", "pma", "hsp"]
    assert [layer.pffn_gdpa.activation for layer in short] == ["gelu", "silu"]
    assert [layer.dim for layer in short] == [16, 16]
    # Scale and norm of the layer's network are still the model's.
    assert short[1].pffn_gdpa == dataclasses.replace(config.pffn_gdpa, activation="silu")


def test_a_list_of_an_event_type_that_repeats_the_model_changes_nothing() -> None:
    same, listed = (
        kunlun(num_layers=3, events={"event1": event})[0].state_dict()
        for event in ({"num_layers": 2}, {"layers": [{}, {}]})
    )
    assert same.keys() == listed.keys()
    assert all(torch.equal(tensor, listed[name]) for name, tensor in same.items())


def test_the_kept_summary_carries_gradients_of_the_layer_that_reuses_it() -> None:
    model, embedding = kunlun(num_layers=3)
    batch = random_batch(random_spec())
    seen: list[Tensor] = []
    for layer in model.stacks[0].layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out.summary))
    logits = model(embedding(batch), batch)
    first, second, third = seen
    assert second is first
    assert third is not first
    # Layer 1 does not pool: its interaction reads what layer 0 has made, and so does the context of layer 2.
    read = torch.autograd.grad(logits.sum(), first)[0]
    assert read.abs().sum() > 0


def test_layers_of_another_event_type_do_not_see_this_one() -> None:
    model, embedding = kunlun(comp_skip=False, num_layers=1)
    batch = random_batch(random_spec(), lengths=[4] * 5)
    outputs = []
    model.stacks[0].layers[0].register_forward_hook(lambda module, args, out: outputs.append(out.values))
    model(embedding(batch), batch)
    model(embedding(with_other_ids(batch, "event1.item")), batch)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def with_other_ids(batch: RequestBatch, key: str) -> RequestBatch:
    ids = batch.histories.values().clone()
    index = batch.histories.keys().index(key)
    counts = batch.histories.length_per_key()
    start = sum(counts[:index])
    ids[start : start + counts[index]] = (ids[start : start + counts[index]] + 1) % 30
    histories = KeyedJaggedTensor(batch.histories.keys(), ids, lengths=batch.histories.lengths())
    return dataclasses.replace(batch, histories=histories)


def test_ages_count_and_time_of_day_does_not() -> None:
    model, embedding = kunlun()
    batch = random_batch(random_spec(), lengths=[5] * 5)
    before = model(embedding(batch), batch)
    shift = 86_400
    times = batch.history_times
    later = KeyedJaggedTensor(times.keys(), times.values() + shift, lengths=times.lengths())
    moved = dataclasses.replace(batch, history_times=later, request_time=batch.request_time + shift)
    torch.testing.assert_close(model(embedding(moved), moved), before, rtol=0, atol=0)
    older = dataclasses.replace(batch, request_time=batch.request_time + shift)
    assert (model(embedding(older), older) - before).abs().max() > 1e-5
    still, _ = kunlun(rotation="position")
    old, new = (still(embedding(each), each) for each in (batch, older))
    torch.testing.assert_close(old, new, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "gone", "there"),
    [
        ({"pffn": "linear"}, "pffn.attention.mix", "pffn.output.weight"),
        ({"pooling": "pma"}, "compress.mix", "pooling.compress.weight"),
        ({"num_target": 0}, "target_query", "attention.query_key_value"),
        ({"event_stacks": "merged"}, "stacks.1", "stacks.0.masks.1"),
        ({"num_experts": 1}, "experts.1", "experts.0"),
    ],
)
def test_an_ablation_is_one_key_that_takes_its_part_out(changes: dict[str, Any], gone: str, there: str) -> None:
    whole, without = (" ".join(dict(kunlun(**each)[0].named_parameters())) for each in ({}, changes))
    assert gone in whole
    assert gone not in without
    assert there in without


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 0},
        {"rotation": "none"},
        {"kron_terms": 1},
        {"comp_skip": False},
        {"pffn_gdpa": GDPAConfig(activation="silu", out_scale=1.0)},
    ],
    ids=str,
)
def test_an_ablation_changes_what_is_computed(changes: dict[str, Any]) -> None:
    batch = random_batch(random_spec(), lengths=[6] * 5)
    logits = []
    for each in ({}, changes):
        model, embedding = kunlun(**each)
        logits.append(model(embedding(batch), batch))
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def test_comp_skip_and_windows_save_what_flops_say() -> None:
    spec = random_spec(max_length=500)
    whole, skipping, narrow = (
        count_flops(build(KunlunConfig(**SMALL | each), spec), spec, DIM)(2, 4, 2000.0, 2_000_000.0)
        for each in ({"comp_skip": False, "window": 0}, {"window": 0}, {"comp_skip": False})
    )
    assert skipping < 0.7 * whole
    assert narrow < whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pffn": "none"}, "model.pffn=none is not known; choose from gdpa, linear"),
        ({"rotation": "rope"}, "model.rotation=rope is not known; choose from time, position, none"),
        ({"kron_terms": 0}, "model.kron_terms=0 must be at least 1"),
        ({"events": {"event0": {"window": -1}}}, "model.events.event0.window=-1 must be at least 0"),
        (
            {"events": {"buy": {}}},
            "model.events names 'buy'; the event types of the data are event0, event1",
        ),
        ({"events": OWN, "event_stacks": "merged"}, "use model.event_stacks=own"),
        ({"events": {"event0": {"num_layers": 5}}}, "event0.num_layers=5 must be at most model.num_layers=2"),
        ({"num_layers": 1}, "model.num_layers=1 must be at least 2, or use model.comp_skip=false"),
        ({"num_experts": 20}, "num_experts=20 share .* tokens of a candidate"),
        ({"num_heads": 3}, r"model.dim=8 must be a multiple of 2 \* num_heads=6"),
        ({"events": {"event1": {"dim": 12, "num_heads": 4}}}, "model.events.event1.dim=12 must be a multiple"),
        (
            {"events": {"event0": {"layers": [{"wukong": {"rank": 2}}, {}]}}},
            r"events\.event0\.layers\.0\.wukong is no key of a layer; set model\.wukong for all, or choose ",
        ),
        (
            {"events": {"event0": {"num_layers": 2, "layers": [{}]}}},
            r"events\.event0\.layers has 1 entries, one a layer, and model\.events\.event0\.num_layers=2",
        ),
        (
            {"events": {"event0": {"layers": [{}] * 3}}},
            r"event0\.layers, of 3 entries, must be at most model\.num_layers=2",
        ),
        ({"layers": [{}, {"num_heads": 3}]}, r"model.dim=8 must be a multiple of 2 \* num_heads=6"),
    ],
)
def test_wrong_fields_are_errors_that_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(KunlunConfig(**SMALL | changes), random_spec())

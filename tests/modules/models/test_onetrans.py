"""OneTrans against its equations on one padded sequence of events and features, and its published ablations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.models import build
from modules.models.onetrans import OneTrans, OneTransConfig
from modules.models.onetrans.layer import kept_lengths
from tests.modules.factories import random_batch, random_spec
from tests.modules.models.test_models import ONETRANS, Ranking, double, double_model
from tests.modules.padded import norm

SPEC = random_spec()
CONFIG = OneTransConfig(**ONETRANS, last_events=2, length_multiple=1, num_layers=3)


def linear(layer: Any, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.einsum("...ti,toi->...to", x, weight)
    return y if bias is None else y + bias.view(weight.shape[:2])


def after(part: Any, x: Tensor, attended: Tensor) -> Tensor:
    x = x + linear(part.output, attended)
    hidden = F.gelu(product(norm(x), part.ffn.w_in, part.ffn.b_in))
    return x + product(hidden, part.ffn.w_out, part.ffn.b_out)


def padded(model: OneTrans, config: OneTransConfig, tokens: Any, batch: Any) -> Tensor:
    """Logits of each candidate for itself: [oldest event .. newest event | tokens of the request | its own tokens],
    one causal softmax over all that a layer is given, and of events only the newest go on."""
    logits = []
    for candidate, row in enumerate(batch.owner.tolist()):
        events = []  # (how old, its type, token), the newest last
        for number, (mlp, history) in enumerate(zip(model.events.mlps, tokens.histories.values(), strict=True)):
            first, last = history.offsets[row : row + 2].tolist()
            made = zip(history.times[first:last].tolist(), mlp(history.values[first:last]), strict=True)
            events += [(time if config.merge == "time" else number, number, token) for time, token in made]
            if config.merge == "types" and "separators" not in config.without and number + 1 < len(tokens.histories):
                events.append((number, number, model.events.separators[len(tokens.histories) - 2 - number]))
        x = [token[None] for _, _, token in sorted(events, key=lambda each: each[:2])]
        if model.request is not None:
            x += [token[None] for token in model.request(norm(tokens.request[row])[None])[0].flip(0)]
        own = model.candidate(norm(tokens.candidate[candidate])[None], norm(tokens.request[row])[None], ONE)[0]
        for layer in model.layers:
            read = norm(torch.cat([torch.zeros(0, own.shape[1], dtype=own.dtype), *x]))
            part = layer.own or layer.sequence
            keys = torch.cat([linear(layer.sequence.key_value, read[:, None])[:, 0], linear(part.key_value, norm(own))])
            key, value = keys.unflatten(1, (2, *layer.heads)).unbind(1)

            def attend(query: Tensor, place: int | None, key: Tensor = key, value: Tensor = value) -> Tensor:
                seen = slice(0, None if place is None else place + 1)
                query = query.unflatten(-1, (config.num_heads, -1))
                scores = torch.einsum("thd,lhd->thl", query, key[seen]) * query.shape[2] ** -0.5
                return torch.einsum("thl,lhd->thd", scores.softmax(2), value[seen]).flatten(1)

            if layer.kept:
                places = range(max(0, len(x) - layer.kept), len(x))
                made = []
                for place in places:
                    query = linear(layer.sequence.query, read[place][None, None])[0]
                    attended = attend(query, place if "causality" not in config.without else len(x) - 1)
                    made.append(after(layer.sequence, x[place][None], attended[None])[0])
            own = after(part, own, attend(linear(part.query, norm(own)), None))
            x = made if layer.kept else x
        logits.append(model.heads(norm(own).flatten()[None]))
    return torch.cat(logits)


ONE = CandidateRows(torch.tensor([0]), torch.tensor([0, 1]))
CHANGES: list[dict[str, Any]] = [
    {"request_tokens": 2},
    {"last_events": 0},
    {"without": ["causality"]},
    {"merge": "types"},
    {"merge": "types", "without": ["separators"]},
    {"without": ["own_weights"]},
    {"tokens": "groups"},
    {"tokens": "groups", "request_tokens": 1, "last_events": 12},
]


@pytest.mark.parametrize("change", [{}, *CHANGES], ids=str)
def test_the_two_stages_are_one_sequence_on_padded_tensors(change: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **change)
    model, batch = double_model(config, SPEC), double(random_batch(SPEC, (2, 0, 3), (5, 2, 0)))
    tokens = model.embedding(batch)
    actual, expected = model.arch(tokens, batch), padded(model.arch, config, tokens, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    parameters = list(model.arch.parameters())
    cotangent = torch.randn_like(actual)
    made = [torch.autograd.grad(y, parameters, cotangent) for y in (actual, expected)]
    for (name, _), a, b in zip(model.arch.named_parameters(), *made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_published_ablation_is_one_override(change: dict[str, Any]) -> None:
    batch = random_batch(SPEC, (2, 0, 3), (5, 2, 4))
    logits = [Ranking(dataclasses.replace(CONFIG, **each), SPEC)(batch).detach() for each in ({}, change)]
    assert not torch.allclose(*logits, atol=1e-5)


def test_the_pyramid_falls_linearly_in_multiples() -> None:
    assert kept_lengths(1190, 12, 6, 32) == [1190, 960, 736, 512, 256, 32]
    assert kept_lengths(50, 12, 3, 1) == [50, 31, 12]
    assert kept_lengths(50, 12, 3, 32) == [50, 32, 32]
    assert kept_lengths(10, 12, 3, 1) == kept_lengths(10, 0, 3, 1) == [10] * 3
    assert kept_lengths(0, 12, 2, 32) == [0, 0]


def test_the_last_layer_makes_no_sequence_that_nobody_reads() -> None:
    *layers, last = build(CONFIG, SPEC).layers
    assert [layer.kept for layer in layers] == [12, 7]
    assert (last.length, last.kept, last.sequence.query) == (7, 0, None)
    with pytest.raises(ValueError, match=r"model\.token_dim=18 must be a multiple of model\.num_heads=4, e\.g\. .*=16"):
        build(OneTransConfig(token_dim=18), SPEC)
    with pytest.raises(ValueError, match=r"use e\.g\. model\.num_tokens=2"):
        build(OneTransConfig(tokens="groups", num_tokens=1), SPEC)
    with pytest.raises(ValueError, match="takes nothing out of model.merge=time; use model.merge=types"):
        build(OneTransConfig(without=["separators"]), SPEC)

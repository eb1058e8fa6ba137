"""The summary of a model: sums, what serves an absent chip, and the change that would help."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.gdpa import gdpa
from modules.costs.flops import FlopCounter, count_flops
from modules.costs.summary import summarise
from modules.models import CONFIGS, build
from modules.precision import apply_recipe
from tests.modules.factories import random_spec

LENGTH = 50


def test_costs_are_those_of_the_model_and_add_up() -> None:
    spec = random_spec(max_length=LENGTH)
    arch = build(CONFIGS["interformer"](), spec)
    summary = summarise(arch, spec, 32)
    costs = {cost.name: cost for cost in summary.costs}
    whole = costs["whole"]
    assert whole.parameters == sum(p.numel() for p in arch.parameters())
    assert whole.flops == torch.tensor(count_flops(arch, spec, 32)(1, 1, 2 * LENGTH, (2 * LENGTH) ** 2)).round()
    for quantity in ("parameters", "flops", "activations"):
        parts = sum(getattr(cost, quantity) for name, cost in costs.items() if name != "whole" and _parts(name) == 1)
        own = 0 if quantity != "activations" else 0.1 * whole.activations  # sums of its own between the arches
        assert whole_minus(parts, getattr(whole, quantity)) <= own, quantity
    assert costs["layers.*"].modules == 2
    assert costs["heads"].precision == "float32"
    half = summarise(arch, spec, 32, dtype=torch.bfloat16)
    assert half.costs[0].activations == whole.activations / 2
    assert {cost.name: cost.precision for cost in half.costs}["heads"] == "bfloat16, float32"


def test_nothing_of_the_batch_stays_alive() -> None:
    spec = random_spec(max_length=LENGTH)
    arch = build(CONFIGS["interformer"](), spec)
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    for module in arch.modules():
        # Registered for good, so it must not hold what it sees.
        module.register_forward_hook(
            lambda _, __, out: seen.append(weakref.ref(out.untyped_storage())) if isinstance(out, Tensor) else None
        )
    summarise(arch, spec, 32)
    gc.collect()
    assert len(seen) > 10
    assert not [storage for storage in seen if storage() is not None]


@pytest.mark.parametrize("attend", [partial(gdpa, score_scale=1.0), jagged_attention])
def test_a_configured_bound_takes_no_memory(attend: Callable[..., Tensor]) -> None:
    offsets, bound = torch.tensor([0, 3, 3, 5]), 10**6  # all pairs of it: 4 TB
    x = torch.randn(5, 1, 4)
    with FlopCounter() as counter:
        out = attend(x, x, x, offsets, offsets, max_q=bound, max_k=bound)
    assert counter.total == 4 * 4 * (9 + 4)
    torch.testing.assert_close(out, attend(x, x, x, offsets, offsets, max_q=3, max_k=3))


def _parts(name: str) -> int:
    return len([part for part in name.split(".") if part != "*"])


def whole_minus(parts: float, whole: float) -> float:
    assert parts <= whole * (1 + 1e-9)
    return whole - parts


def test_activations_grow_with_the_history_and_not_with_its_square() -> None:
    sizes = []
    for length in (20, 40, 80):
        spec = random_spec(max_length=length)
        sizes.append(summarise(build(CONFIGS["interformer"](), spec), spec, 32).costs[0].activations)
    first, second = sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert second == 2 * first > 0


def test_backends_are_those_of_the_chip_and_the_sizes() -> None:
    spec = random_spec(max_length=LENGTH)
    summary = summarise(build(CONFIGS["interformer"](), spec), spec, 32, dtype=torch.bfloat16, capability=(9, 0))
    served = {each.module: each for each in summary.served if each.op == "jagged_attention"}
    attention = served["layers.*.sequence.attention"]
    assert attention.backend != "hopper"
    assert attention.refusals["hopper"]
    (sentence,) = [each for each in summary.slow() if "sequence.attention" in each]
    assert "head_dim=64 instead of 16 (model.dim / model.num_heads)" in sentence
    wide = CONFIGS["interformer"](dim=128)
    wider = summarise(build(wide, spec), spec, 128, dtype=torch.bfloat16, capability=(9, 0))
    served = {each.module: each.backend for each in wider.served if each.op == "jagged_attention"}
    assert served["layers.*.sequence.attention"] == "hopper"
    assert not [each for each in wider.slow() if "sequence.attention" in each]
    assert "hopper" in str(wider)


def test_quantised_layers_are_shown_as_such() -> None:
    spec = random_spec(max_length=LENGTH)
    arch = build(CONFIGS["interformer"](dim=64), spec)
    apply_recipe(arch, "mxfp8", ["*.query_key_value"])
    summary = summarise(arch, spec, 64, dtype=torch.bfloat16)
    precision = {cost.name: cost.precision for cost in summary.costs}
    assert precision["layers.*.sequence"] == "bfloat16, mxfp8"
    assert "mxfp8_linear" in {each.op for each in summary.served}
    arch = build(CONFIGS["interformer"](dim=128), spec)
    apply_recipe(arch, "mxfp8_g128", ["*.query_key_value"])
    served = summarise(
        arch, spec, 128, dtype=torch.bfloat16, capability=(9, 0)
    ).served  # whose results are bfloat16, too
    assert {each.backend for each in served if each.op == "mxfp8_linear"} == {"hopper"}


GDPA = {"activation": "silu"}


def test_layers_that_the_configuration_tells_apart_are_apart_and_the_others_together() -> None:
    spec = random_spec(max_length=LENGTH)
    config = CONFIGS["kunlun"](
        layers=[{"window": 4}, {"window": 5}, {"window": 4}, {"pffn_gdpa": GDPA}, {}],
        events={"event1": {"layers": [{}, {}, {}, {}, {"num_seeds": 3}]}},
    )
    assert config.describe_layers() == [
        "window=4, computes=[pffn,pooling]",
        "window=5, computes=[attention]",
        "window=4, computes=[pffn,pooling]",
        "pffn_gdpa.activation=silu, computes=[attention]",
        "computes=[pffn,pooling]; event1: num_seeds=3",
    ]
    arch = build(config, spec)
    summary = summarise(arch, spec, 32, layers=config.describe_layers())
    modules = {cost.name: cost.modules for cost in summary.costs}
    assert [modules[f"layers.{places}"] for places in ("0,2", "1", "3", "4")] == [2, 1, 1, 1]
    assert [modules[f"stacks.*.layers.{places}"] for places in ("0,2", "1", "3", "4")] == [4, 2, 2, 2]
    assert "stacks.*.layers.0,2.pffn.attention" in {each.module for each in summary.served}
    table = [line.split(maxsplit=1) for line in str(summary).splitlines()[-5:]]
    assert table[0] == ["layers", "keys of their own"]
    assert table[1] == ["layers.0,2", "window=4, computes=[pffn,pooling]"]
    assert str(summarise(arch, spec, 32, layers=["rank=2", "", "", "", ""])).endswith("layers.1,2,3,4  as the model")
    together = summarise(arch, spec, 32)
    assert sum(cost.flops for cost in together.costs) == sum(cost.flops for cost in summary.costs)
    assert "layers.*" in {cost.name for cost in together.costs}
    assert "keys of their own" not in str(together)

"""What quantised experts keep of their hidden rows: MXINT8, how good it is, and in how many bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import moe
from kernels.core import dispatch
from kernels.testing import poisoned_empty, sqnr_db

pytest.importorskip("triton")
from kernels.moe.hopper import experts as fused
from kernels.moe.hopper import hidden
from kernels.moe.hopper import swiglu_quantized as hopper
from kernels.moe.reference import capacity_of
from tests.kernels.core.devices import on_hopper
from tests.kernels.moe import moe_standins
from tests.kernels.moe.moe_cases import layer, random
from tests.kernels.moe.test_moe_fused import on_cpu, one_at_a_time, qualities

__all__ = ["on_cpu"]  # a fixture


def kept(x: Tensor) -> Tensor:
    return moe_standins.mxint8_values(*moe_standins.mxint8(x))


def blocks_of_every_kind() -> Tensor:
    """bfloat16 [128, 256]: exponents, ties, blocks of zeros, the smallest and the largest magnitudes, broken values."""
    x = random(128, 256, seed=3) * torch.exp2(torch.randint(-40, 40, (128, 8)).float()).repeat_interleave(32, 1)
    x[0] = 0.0
    x[1, :32] = torch.arange(32) * 0.5 + 48.0  # ties
    x[2] = 2.0**-133  # subnormal
    x[3] = random(256, seed=4) * 2.0**-118
    x[4, :32], x[4, 32:64], x[4, 64:96] = 2.0**110, 2.0**111, 2.0**127
    x[5, 0], x[5, 32], x[5, 64] = 127.5 / 64, 127.0 / 64, -127.5 / 64  # the largest mantissas
    x[6, 5], x[6, 37], x[6, 70] = math.nan, math.inf, -math.inf
    return x.bfloat16()


def test_mxint8_is_as_good_as_documented() -> None:
    x = random(128, 256).bfloat16()
    assert 41 < sqnr_db(kept(x), x.double()) < 42


def test_broken_blocks_are_nan_and_others_within_half_a_code() -> None:
    x = blocks_of_every_kind()
    values = kept(x).unflatten(1, (-1, 32))
    blocks = x.double().unflatten(1, (-1, 32))
    broken = ~(blocks.abs() < 2.0**111).all(2)
    assert broken.sum() == 5
    assert values[broken].isnan().all()
    largest = blocks.abs().amax(2, keepdim=True)
    # At least 64 codes for the largest one, 63.75 for one that 127 codes just miss; and half of the smallest unit.
    errors = (values.double() - blocks).abs()
    assert (errors <= largest / 63.75 / 2 + 2.0**-127)[~broken].all()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_gradients_lose_little(on_cpu: None, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """Against a backward that has the hidden rows in bfloat16."""
    case, written = layer(512, 128, 256, 3, 2), []
    mxint8 = moe_standins.mxint8
    monkeypatch.setattr(moe_standins, "mxint8", lambda x: (written.append(x), mxint8(x))[1])
    kept = qualities(fused.experts, case, recipe, "cpu")
    monkeypatch.setattr(moe_standins, "mxint8_values", lambda codes, scales: written[-1].float())
    exact = qualities(fused.experts, case, recipe, "cpu")
    assert kept["out"] == exact["out"]
    for name in ("x", "weights", "gate_up", "down"):
        assert exact[name] - 0.25 < kept[name] < exact[name], (name, kept[name], exact[name])
        assert kept[name] > 22.5  # half a dB above what test_precision.py asks for


def saved_bytes(y: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in y.grad_fn.saved_tensors)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_hidden_rows_are_kept_in_half_the_bytes(on_cpu: None, recipe: str) -> None:
    chosen, leaves, _ = layer(900, 64, 256, 2, 2)
    own = {name: value.requires_grad_() for name, value in leaves.items()}
    rows = 1800 + 2 * 127 + 128
    weights = sum(value.numel() * value.element_size() for name, value in leaves.items() if name != "x")
    # The rows of x and gate and up, a byte each, a 32nd for their scales, and the places.
    assert saved_bytes(fused.experts(selected_experts=chosen, recipe=recipe, **own)) - weights < rows * (
        (64 + 2 * 256) * (1 + 1 / 32) + 16
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_many_rows_come_in_two_parts(on_cpu: None, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    chosen, leaves, upstream = layer(450, 64, 128, 3, 2)

    def run() -> list[Tensor]:
        own = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        y = fused.experts(selected_experts=chosen, recipe=recipe, **own)
        return [y, *torch.autograd.grad(y, list(own.values()), upstream)]

    whole = run()
    shapes = []
    fprop = hidden.fprop

    def counted(a, b, ends: Tensor) -> Tensor:
        shapes.append(a.codes.shape[0])
        return fprop(a, b, ends)

    monkeypatch.setattr(hidden, "_LARGE", 128)
    monkeypatch.setattr(hidden, "fprop", counted)
    parts = run()
    assert sum(shapes) == capacity_of(900, 3)
    assert len(shapes) == 2
    assert 0 < shapes[0] <= shapes[1]
    assert all(torch.equal(*pair) for pair in zip(whole, parts, strict=True))


@on_hopper
@pytest.mark.parametrize("group", [32, 128])
def test_gpu_codes_of_blocks_of_every_kind(group: int) -> None:
    x = blocks_of_every_kind()
    with poisoned_empty():
        results = hopper.empty_results(128, 128, group, True, torch.device("cuda"))
        hopper.swiglu_quantized(x.cuda(), torch.tensor([128], device="cuda"), group, results)
    codes, scales = moe_standins.mxint8(x)
    whole = (x.unflatten(1, (-1, 32)).abs() < 2.0**111).all(2)
    assert torch.equal(results.kept_scales.cpu(), scales)
    assert torch.equal(results.kept.cpu().unflatten(1, (-1, 32))[whole], codes.unflatten(1, (-1, 32))[whole])


@on_hopper
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_gpu_many_rows_come_in_two_parts(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    chosen, leaves, upstream = layer(3000, 256, 384, 5, 2)

    def run() -> list[Tensor]:
        own = {name: value.cuda().bfloat16().requires_grad_() for name, value in leaves.items()}
        with poisoned_empty():
            y = moe.experts(selected_experts=chosen.cuda(), recipe=recipe, backend="hopper", **own)
            return [y, *torch.autograd.grad(y, list(own.values()), upstream.cuda().bfloat16())]

    whole = run()
    dispatch.force("moe_hidden=reference")
    try:
        passes = run()
        monkeypatch.setattr(hidden, "_LARGE", 128)
        parts = run()
    finally:
        dispatch.force("")
    for other in (passes, parts):  # with groups of 128, the whole is SwiGLU in the product
        assert all(torch.equal(*pair) for pair in zip(whole, other, strict=True))
    expected = one_at_a_time(chosen, *(value.double() for value in leaves.values()))
    assert sqnr_db(whole[0].detach().cpu(), expected) > 22

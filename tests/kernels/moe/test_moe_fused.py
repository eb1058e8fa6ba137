"""The fused experts against experts one token at a time: in stand-ins of their kernels on the CPU, and on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import moe
from kernels.core import dispatch
from kernels.testing import poisoned_empty, sqnr_db
from modules.layers.moe import MoE

pytest.importorskip("triton")
from kernels.moe import GROUPS
from kernels.moe.hopper import experts as fused
from kernels.moe.hopper import gather, hidden, swiglu, swiglu_quantized
from kernels.moe.triton import route
from kernels.mxfp8.hopper import dequantize
from kernels.mxfp8.hopper.quantize import operators as quantize
from tests.kernels.core.on_gpu import assert_same_bits, without_waiting
from tests.kernels.core.ungraded import ungraded
from tests.kernels.moe import moe_standins
from tests.kernels.moe.moe_cases import RECIPES, layer, random


def one_at_a_time(chosen: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = x.new_zeros(len(x), down.shape[1])
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = (x @ first.t()).chunk(2, 1)
        share = (weights * (chosen == expert)).sum(1, keepdim=True)
        out = out + share * ((torch.nn.functional.silu(gate) * up) @ second.t())
    return out


def compare(
    run, chosen: Tensor, leaves: dict[str, Tensor], upstream: Tensor, recipe: str, device: str, dtype: torch.dtype
) -> None:
    """Output and every gradient of `run` against float64, on the same rounded inputs."""
    own = {name: value.to(device, dtype if name == "x" else None).requires_grad_() for name, value in leaves.items()}
    exact = {name: value.detach().double().cpu().requires_grad_() for name, value in own.items()}
    y = run(selected_experts=chosen.to(device), recipe=recipe, **own)
    expected = one_at_a_time(chosen, **exact)
    assert y.dtype is dtype
    grads = torch.autograd.grad(y, list(own.values()), upstream.to(device, dtype))
    expected_grads = torch.autograd.grad(expected, list(exact.values()), upstream.to(dtype).double())
    for name, actual, oracle in zip(["out", *own], [y, *grads], [expected, *expected_grads], strict=True):
        oracle, actual = oracle.detach(), actual.detach()
        if name in own:
            assert actual.dtype is own[name].dtype
        assert bool(actual.isfinite().all())
        if not oracle.any():
            assert not actual.any()
            continue
        # bfloat16: operands and h, y, o are rounded, 2^-9 each: about 45 dB. Two quantised operands leave 28.5 dB of a
        # product and the longest chain has three: as in test_precision.py, 22 dB leaves 2 dB for a small layer.
        # The few elements of one token scatter by more.
        quality = sqnr_db(actual.cpu(), oracle)
        assert quality > (22 if len(chosen) > 1 else 19), (name, quality)
        assert (quality > 38) == (recipe == "bf16"), (name, quality)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused operator with what its kernels compute in plain PyTorch."""
    for module, names in (
        (route, ("permutation", "combine", "collect")),
        (gather, ("gather",)),
        (swiglu, ("swiglu_backward",)),
        (hidden, ("swiglu", "empty_results", "swiglu_quantized")),
        (swiglu_quantized, ("swiglu_quantized_backward",)),
        (quantize, ("quantize_both",)),
        (dequantize, ("dequantize_interleaved",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(moe_standins, name))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_operator_is_the_layer(on_cpu: None, recipe: str, dtype: torch.dtype) -> None:
    for case in (layer(150, 96, 128, 3, 2), layer(60, 96, 128, 3, 1, out_dim=160)):
        compare(fused.experts, *case, recipe, "cpu", dtype)


def qualities(run, case: tuple, recipe: str, device: str) -> dict[str, float]:
    """Signal to noise of the output and of every gradient against float64, in dB."""
    chosen, leaves, upstream = case
    own = {name: value.to(device).requires_grad_() for name, value in leaves.items()}
    exact = {name: value.double().requires_grad_() for name, value in leaves.items()}
    results = []
    for y, inputs in (
        (run(selected_experts=chosen.to(device), recipe=recipe, **own), own),
        (one_at_a_time(chosen, **exact), exact),
    ):
        results.append((y, *torch.autograd.grad(y, list(inputs.values()), upstream.to(y))))
    pairs = zip(["out", *leaves], *results, strict=True)
    return {name: sqnr_db(actual.detach().cpu(), oracle.detach()) for name, actual, oracle in pairs}


def as_good_as_dequantised(run, case: tuple, recipe: str, device: str) -> None:
    """Held to operands dequantised to float32 and multiplied there, on the CPU."""
    by_definition = qualities(partial(moe.experts, backend="reference"), case, recipe, "cpu")
    for name, quality in qualities(run, case, recipe, device).items():
        # They quantise at other places, so the noise is another draw of the same size; y, h and results are bfloat16.
        assert quality > by_definition[name] - 0.3, (name, quality, by_definition[name])


@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_the_fused_operator_is_as_good_as_dequantised_products_in_float32(on_cpu: None, recipe: str) -> None:
    as_good_as_dequantised(fused.experts, layer(150, 96, 128, 3, 2), recipe, "cpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fused_operator_on_no_tokens_and_idle_experts(on_cpu: None, recipe: str) -> None:
    for case in (layer(0, 64, 128, 3, 2), layer(5, 64, 128, 6, 1, "one")):
        compare(fused.experts, *case, recipe, "cpu", torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_that_is_kept_can_be_differentiated_again(on_cpu: None, recipe: str) -> None:
    """The last backward writes its results over what the forward kept, and no other one does."""
    chosen, leaves, upstream = layer(40, 64, 128, 3, 2)
    own = {name: value.requires_grad_() for name, value in leaves.items()}
    y = fused.experts(selected_experts=chosen, recipe=recipe, **own)
    hidden = y.grad_fn.saved_tensors[3]
    before = hidden.clone()
    first = torch.autograd.grad(y, list(own.values()), upstream, retain_graph=True)
    assert torch.equal(hidden, before)
    last = torch.autograd.grad(y, list(own.values()), upstream)
    assert not torch.equal(hidden, before)
    assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fused_operator_traces(recipe: str) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        chosen, leaves, upstream = layer(10, 64, 128, 3, 2, out_dim=96)
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        y = fused.experts(selected_experts=chosen, recipe=recipe, **leaves)
        grads = torch.autograd.grad(y, list(leaves.values()), upstream)
    assert [grad.shape for grad in grads] == [value.shape for value in leaves.values()]


def test_one_graph_serves_any_number_of_tokens(on_cpu: None) -> None:
    """Also fewer selections than experts, and numbers that are known on the device alone."""

    def function(x: Tensor, selected_experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        some = (x[:, 0] < 10).nonzero()[:, 0]
        return fused.experts(x[some], selected_experts[some], weights[some], gate_up, down, "bf16")

    graphs = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=graphs, dynamic=True, fullgraph=True)
        for num_tokens in (50, 2, 3):
            chosen, leaves, upstream = layer(num_tokens, 64, 128, 8, 2)
            compare(
                lambda recipe, **tensors: compiled(**tensors), chosen, leaves, upstream, "bf16", "cpu", torch.float32
            )
    assert graphs.frame_count == 1


def test_results_have_the_strides_that_a_trace_says(on_cpu: None) -> None:
    chosen, leaves, upstream = layer(10, 64, 128, 3, 2)
    x, weights, gate_up, down = leaves.values()
    weights, down = weights.t().contiguous().t(), down.mT.contiguous().mT
    tests = ("test_schema", "test_faketensor")
    forward = (x, chosen, weights, gate_up, down, 0, torch.float32, True)
    torch.library.opcheck(fused._forward.definition, forward, test_utils=tests)
    backward = (upstream, weights, gate_up, down, fused._forward(*forward)[1:], 0, torch.float32)
    for needs in ([True] * 4, [False, True, False, True], [True, False, True, False]):
        torch.library.opcheck(fused._backward.definition, (*backward, needs), test_utils=tests)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8_g128"])
@pytest.mark.parametrize(
    ("needed", "inputs", "weights"),
    [
        (("x", "weights"), 2, 0),
        (("gate_up",), 1, 1),
        (("weights", "down"), 1, 1),
        (("weights", "gate_up", "down"), 1, 2),
        (("x",), 2, 0),
    ],
)
def test_what_needs_no_gradient_costs_none(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, needed: tuple[str, ...], inputs: int, weights: int, recipe: str
) -> None:
    """`inputs` and `weights` are how many gradients of the products' inputs and weights are computed."""
    chosen, leaves, upstream = layer(40, 64, 128, 3, 2)
    own = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    full = torch.autograd.grad(
        fused.experts(selected_experts=chosen, recipe=recipe, **own), list(own.values()), upstream
    )
    expected = dict(zip(own, full, strict=True))
    frozen = {name: value.clone().requires_grad_(name in needed) for name, value in leaves.items()}
    y = fused.experts(selected_experts=chosen, recipe=recipe, **frozen)
    calls = {"fprop": 0, "wgrad": 0}

    def counted(name: str):
        function = getattr(fused, name)

        def call(*arguments):
            calls[name] += 1
            return function(*arguments)

        return call

    for name in calls:
        monkeypatch.setattr(fused, name, counted(name))
    y.backward(upstream)
    for name, value in frozen.items():
        if name in needed:
            assert torch.equal(value.grad, expected[name])
        else:
            assert value.grad is None
    assert calls == {"fprop": inputs, "wgrad": weights}


def test_a_result_without_a_gradient_gives_none(on_cpu: None) -> None:
    chosen, leaves, _ = layer(20, 64, 128, 3, 2)
    own = {name: value.requires_grad_() for name, value in leaves.items()}
    ungraded(fused.experts(selected_experts=chosen, recipe="bf16", **own)).backward()
    assert all(x.grad is None for x in own.values())


def test_a_graph_with_frozen_experts(on_cpu: None) -> None:
    chosen, leaves, upstream = layer(20, 64, 128, 3, 2)
    leaves["x"].requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(fused.experts, backend="aot_eager", fullgraph=True)
    actual, expected = (
        torch.autograd.grad(function(selected_experts=chosen, recipe="bf16", **leaves), leaves["x"], upstream)[0]
        for function in (compiled, fused.experts)
    )
    assert torch.equal(actual, expected)


def test_bad_shapes_say_what_fits() -> None:
    chosen, leaves, _ = layer(4, 32, 128, 3, 2)
    with pytest.raises(ValueError, match=r"x must be \[N, 32\].*got \[4, 31\]"):
        moe.experts(selected_experts=chosen, recipe="none", **leaves | {"x": leaves["x"][:, 1:]})
    with pytest.raises(ValueError, match=r"down must be \[E, O, F\] = \[3, O, 128\]"):
        moe.experts(selected_experts=chosen, recipe="none", **leaves | {"down": leaves["down"].mT})
    with pytest.raises(ValueError, match=r"selected_experts and weights must be \[4, k\].*\[3, 2\]"):
        moe.experts(selected_experts=chosen[1:], recipe="none", **leaves)
    with pytest.raises(ValueError, match=r"gate_up must be \[E, 2F, D\], got \[256, 32\]"):
        moe.experts(selected_experts=chosen, recipe="none", **leaves | {"gate_up": leaves["gate_up"][0]})
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        moe.experts(selected_experts=chosen, recipe="fp8", **leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_experts(recipe: str, dtype: torch.dtype) -> None:
    def run(**arguments) -> Tensor:
        with poisoned_empty():
            return moe.experts(backend="hopper", **arguments)

    for case in (
        layer(700, 256, 384, 5, 3),
        layer(100, 96, 128, 7, 2, "one"),
        layer(500, 256, 128, 4, 1, out_dim=384),
        layer(1, 128, 128, 4, 2),
        layer(0, 128, 128, 4, 2),
    ):
        # poisoned_empty shows what a kernel does not write; rows behind the last end stay poisoned and must not matter.
        compare(run, *case, recipe, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_gpu_experts_are_as_good_as_dequantised_products_in_float32(recipe: str) -> None:
    as_good_as_dequantised(partial(moe.experts, backend="hopper"), layer(700, 256, 384, 5, 3), recipe, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_gpu_operator_passes_opcheck(recipe: str) -> None:
    chosen, leaves, _ = layer(60, 96, 128, 3, 2)
    x, weights, gate_up, down = (value.cuda() for value in leaves.values())
    arguments = (x, chosen.cuda(), weights, gate_up, down, GROUPS[recipe], torch.bfloat16, True)
    torch.library.opcheck(fused._forward.definition, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["none", "mxfp8", "mxfp8_g128"])
def test_gpu_module_runs_the_fused_operator_under_autocast(recipe: str) -> None:
    torch.manual_seed(0)
    module = MoE(128, 256, 6, 2, num_shared_experts=1).cuda()
    module.experts.recipe = recipe
    x = random(400, 128).cuda().requires_grad_()

    def run(backend: str) -> list[Tensor]:
        dispatch.force(f"moe_experts={backend}")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                y = module(x)
            return [y, *torch.autograd.grad(y.float().square().mean(), [x, *module.parameters()])]
        finally:
            dispatch.force("")

    for actual, expected in zip(run("hopper"), run("reference"), strict=True):
        assert actual.dtype is expected.dtype
        # Both quantise, at other places: their errors add up to 3 dB more than one's.
        assert sqnr_db(actual, expected) > (35 if recipe == "none" else 19)


@pytest.mark.gpu
def test_gpu_experts_are_bitwise_repeatable_and_do_not_sync() -> None:
    chosen, leaves, upstream = layer(500, 128, 256, 6, 2)
    own = {name: value.cuda().requires_grad_() for name, value in leaves.items()}
    chosen, upstream = chosen.cuda(), upstream.cuda()

    def run() -> list[Tensor]:
        y = moe.experts(selected_experts=chosen, recipe="mxfp8_g128", backend="hopper", **own)
        return [y, *torch.autograd.grad(y, list(own.values()), upstream)]

    assert_same_bits(partial(without_waiting, run), runs=2)

"""The fused experts: their places, their kernels, and the whole operator against experts one token at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from kernels import dispatch, moe
from kernels.moe import reference
from kernels.moe.reference import ROWS, capacity_of
from kernels.testing import Tolerance, assert_close_to_oracle, compile_ahead, poisoned_empty, sqnr_db
from modules.moe import MoE

pytest.importorskip("triton")
from kernels.moe import fused, gluon_gather, gluon_swiglu, triton_route
from kernels.mxfp8 import gluon_quantize
from tests.kernels import moe_standins
from tests.kernels.interpreting import interpret

RECIPES = ["bf16", "mxfp8", "mxfp8_g128"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing(num_tokens: int, num_experts: int, top_k: int, load: str = "random") -> Tensor:
    """Distinct experts for each token."""
    if load == "one":
        return torch.arange(top_k).flip(0).expand(num_tokens, top_k).contiguous()
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    return (scores if load == "random" else scores * torch.arange(num_experts)).topk(top_k).indices


# Tokens, experts, k, load: no tokens, one, no expert without rows, most experts without rows, more than a block counts.
ROUTINGS = [
    (0, 4, 2, "random"),
    (1, 3, 1, "random"),
    (200, 3, 3, "random"),
    (300, 64, 2, "one"),
    (2000, 20, 4, "skewed"),
]


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS)
def test_places_are_stable_padded_and_inverse(num_tokens: int, num_experts: int, top_k: int, load: str) -> None:
    chosen = routing(num_tokens, num_experts, top_k, load)
    places = reference.permutation(chosen, num_experts)
    assert places.selections.shape == (capacity_of(chosen.numel(), num_experts),)
    selections, start = places.selections.tolist(), 0
    for expert, end in enumerate(places.ends.tolist()):
        own = [s for s, e in enumerate(chosen.flatten().tolist()) if e == expert]
        padding = -len(own) % ROWS
        assert selections[start:end] == own + [-1] * padding
        start = end
    flat = places.rows.flatten()
    assert torch.equal(places.selections[flat.long()].long(), torch.arange(len(flat)))
    assert len(selections) >= start


def test_the_capacity_fits_the_worst_division() -> None:
    for experts, sizes in itertools.product((1, 3, 5), ([0], [1, 1, 1], [129, 1], [128, 256], [5, 120, 130, 1, 1])):
        padded = sum(-(-size // ROWS) * ROWS for size in sizes[:experts])
        assert padded <= capacity_of(sum(sizes[:experts]), experts)


def assert_same_places(actual: reference.Permutation, expected: reference.Permutation) -> None:
    assert torch.equal(actual.rows.cpu(), expected.rows)
    assert torch.equal(actual.ends.cpu(), expected.ends)
    # Behind the last end nothing is written.
    end = int(expected.ends[-1])
    assert torch.equal(actual.selections[:end].cpu(), expected.selections[:end])


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS[2:])
def test_route_kernels_interpreted(monkeypatch, num_tokens, num_experts, top_k, load) -> None:
    interpret(monkeypatch, triton_route)
    monkeypatch.setattr(triton_route, "_PROGRAMS", 5)
    chosen = routing(num_tokens, num_experts, top_k, load)
    places = triton_route.permutation(chosen, num_experts)
    assert_same_places(places, reference.permutation(chosen, num_experts))
    values = random(places.selections.shape[0], 70)
    weights = random(num_tokens, top_k, seed=1)
    for factor in (weights, None):
        actual = triton_route.combine(values, places.rows, factor, torch.float32)
        torch.testing.assert_close(actual, moe_standins.combine(values, places.rows, factor, torch.float32))
    partial = random(places.selections.shape[0], 5)
    actual = triton_route.collect(partial, places.rows, torch.float32)
    torch.testing.assert_close(actual, moe_standins.collect(partial, places.rows, torch.float32))


def layer(num_tokens: int, dim: int, expert_dim: int, num_experts: int, top_k: int, load: str = "random"):
    chosen = routing(num_tokens, num_experts, top_k, load)
    leaves = {
        "x": random(num_tokens, dim, seed=1),
        "weights": torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(2)),
        "gate_up": random(num_experts, 2 * expert_dim, dim, seed=3) / dim**0.5,
        "down": random(num_experts, dim, expert_dim, seed=4) / expert_dim**0.5,
    }
    return chosen, leaves, random(num_tokens, dim, seed=5)


def one_at_a_time(chosen: Tensor, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x)
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
    y = run(chosen=chosen.to(device), recipe=recipe, **own)
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
        (triton_route, ("permutation", "combine", "collect")),
        (gluon_gather, ("gather",)),
        (gluon_swiglu, ("swiglu", "swiglu_backward")),
        (gluon_quantize, ("quantize_both",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(moe_standins, name))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_operator_is_the_layer(on_cpu: None, recipe: str, dtype: torch.dtype) -> None:
    chosen, leaves, upstream = layer(150, 96, 128, 3, 2)
    compare(fused.experts, chosen, leaves, upstream, recipe, "cpu", dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fused_operator_on_no_tokens_and_idle_experts(on_cpu: None, recipe: str) -> None:
    for case in (layer(0, 64, 128, 3, 2), layer(5, 64, 128, 6, 1, "one")):
        compare(fused.experts, *case, recipe, "cpu", torch.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fused_operator_traces(recipe: str) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        chosen, leaves, upstream = layer(10, 64, 128, 3, 2)
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        y = fused.experts(chosen=chosen, recipe=recipe, **leaves)
        grads = torch.autograd.grad(y, list(leaves.values()), upstream)
    assert [grad.shape for grad in grads] == [value.shape for value in leaves.values()]


def test_one_graph_serves_any_number_of_tokens(on_cpu: None) -> None:
    """Also fewer selections than experts, and numbers that are known on the device alone."""

    def function(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        some = (x[:, 0] < 10).nonzero()[:, 0]
        return fused.experts(x[some], chosen[some], weights[some], gate_up, down, "bf16")

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
    full = torch.autograd.grad(fused.experts(chosen=chosen, recipe=recipe, **own), list(own.values()), upstream)
    expected = dict(zip(own, full, strict=True))
    frozen = {name: value.clone().requires_grad_(name in needed) for name, value in leaves.items()}
    y = fused.experts(chosen=chosen, recipe=recipe, **frozen)
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


def test_a_graph_with_frozen_experts(on_cpu: None) -> None:
    chosen, leaves, upstream = layer(20, 64, 128, 3, 2)
    leaves["x"].requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(fused.experts, backend="aot_eager", fullgraph=True)
    actual, expected = (
        torch.autograd.grad(function(chosen=chosen, recipe="bf16", **leaves), leaves["x"], upstream)[0]
        for function in (compiled, fused.experts)
    )
    assert torch.equal(actual, expected)


def test_bad_shapes_say_what_fits() -> None:
    chosen, leaves, _ = layer(4, 32, 128, 3, 2)
    with pytest.raises(ValueError, match=r"x must be \[N, 32\].*got \[4, 31\]"):
        moe.experts(chosen=chosen, recipe="none", **leaves | {"x": leaves["x"][:, 1:]})
    with pytest.raises(ValueError, match=r"down must be \[E, D, F\] = \[3, 32, 128\]"):
        moe.experts(chosen=chosen, recipe="none", **leaves | {"down": leaves["down"].mT})
    with pytest.raises(ValueError, match=r"chosen and weights must be \[4, k\].*\[3, 2\]"):
        moe.experts(chosen=chosen[1:], recipe="none", **leaves)
    with pytest.raises(ValueError, match=r"gate_up must be \[E, 2F, D\], got \[256, 32\]"):
        moe.experts(chosen=chosen, recipe="none", **leaves | {"gate_up": leaves["gate_up"][0]})
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        moe.experts(chosen=chosen, recipe="fp8", **leaves)


def test_kernels_compile_within_their_registers() -> None:
    options = gluon_quantize.launch_options()
    constants = {"GROUP": 128, "R": options.pop("R")}
    pointers = {"selections": "*i32", "weights": "*fp32", "ends": "*i32", "num_groups": "i32"}
    outputs = {f"{name}_codes": "*fp8e4nv" for name in ("row", "column", "result")}
    outputs |= {f"{name}_scales": "*u8" for name in ("row", "column", "result")}
    sizes = {"num_rows": "i32", "width": "i32"}
    backward = compile_ahead(
        gluon_swiglu.backward_kernel,
        {"gate_up": "*bf16", "grad": "*bf16", **pointers, **outputs, "partial": "*fp32", **sizes},
        constants,
        target="sm_90",
        gluon=True,
        divisible_by_16=list(sizes),
        **options,
    )
    # Two programs share the 228 KiB of a multiprocessor; a few registers' worth of spills costs less than one program.
    assert 2 * (backward.shared_bytes + 1024) <= 228 * 1024
    assert backward.spill_bytes <= 128
    forward = compile_ahead(
        gluon_swiglu.forward_kernel,
        {"gate_up": "*bf16", "ends": "*i32", "num_groups": "i32", "codes": "*fp8e4nv", "scales": "*u8", **sizes},
        constants,
        target="sm_90",
        gluon=True,
        divisible_by_16=list(sizes),
        **options,
    )
    assert forward.spill_bytes == 0


def same_codes(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(actual.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_nearly_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """But for values between two codes, where one compilation fused a multiplication with an addition."""
    for own, other in zip(actual, expected, strict=True):
        different = own.cpu().contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)
        assert different.float().mean() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "load"), ROUTINGS)
def test_gpu_places(num_tokens: int, num_experts: int, top_k: int, load: str) -> None:
    chosen = routing(num_tokens, num_experts, top_k, load)
    actual = triton_route.permutation(chosen.cuda(), num_experts)
    assert_same_places(actual, reference.permutation(chosen, num_experts))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [96, 256])
def test_gpu_gather_bit_for_bit(group: int, dtype: torch.dtype, dim: int) -> None:
    x, places = random(300, 2 * dim, dtype=dtype)[:, :dim], reference.permutation(routing(300, 5, 2), 5)
    expected = moe_standins.gather(x, places, group, group > 0)
    with poisoned_empty():
        actual = gluon_gather.gather(x.cuda(), type(places)(*(t.cuda() for t in places)), group, group > 0)
    end = int(places.ends[-1])
    assert same_codes(actual[0][:end], expected[0][:end])
    if group:
        assert torch.equal(actual[1][:end].cpu(), expected[1][:end])
        assert same_codes(actual[2][:, :end], expected[2][:, :end])
        assert torch.equal(actual[3][:, : end // 32].cpu(), expected[3][:, : end // 32])


# sigmoid by ex2 and a division of 2 ulp, products in float32, one rounding of the result.
ONE_ROUNDING = Tolerance("float32 within a few ulp, rounded once", roundings=2)


@pytest.mark.gpu
def test_gpu_swiglu_and_its_gradients() -> None:
    places = reference.permutation(routing(300, 5, 2), 5)
    on_gpu = type(places)(*(t.cuda() for t in places))
    rows, end = places.selections.shape[0], int(places.ends[-1])
    gate_up, grad, weights = random(rows, 512, dtype=torch.bfloat16), random(rows, 256, seed=1), torch.rand(300, 2)
    gate_up, grad = 3 * gate_up, grad.bfloat16()
    forward = gluon_swiglu.swiglu(gate_up.cuda(), on_gpu.ends, 0)[0][:end].cpu()
    leaf = gate_up[:end].double().requires_grad_()
    result = reference.swiglu(leaf)
    assert_close_to_oracle(forward, result.detach(), ONE_ROUNDING)
    selections = places.selections[:end].long()
    weight = (weights.flatten()[selections.clamp(min=0)] * (selections >= 0))[:, None].double()
    (d_hidden,) = torch.autograd.grad(result, leaf, grad[:end].double() * weight)
    arguments = (gate_up.cuda(), grad.cuda(), on_gpu.selections, weights.cuda(), on_gpu.ends)
    with poisoned_empty():
        plain = gluon_swiglu.swiglu_backward(*arguments, 0)
    assert_close_to_oracle(plain[0][:end].cpu(), d_hidden, ONE_ROUNDING, "d gate_up")
    assert_close_to_oracle(plain[4][:end].cpu(), (result * weight).detach(), ONE_ROUNDING, "weighted result")
    products = (result * grad[:end].double()).detach().unflatten(1, (-1, ROWS))
    # Each term has a result that was rounded to bfloat16, twice where another exponential falls on the other side.
    errors = (plain[6][:end].cpu() - products.sum(2)).abs()
    assert (errors <= 2**-8 * products.abs().sum(2) + 1e-6).all()
    # What is quantised is what is written without quantisation.
    for group in (32, 128):
        with poisoned_empty():
            codes, scales = gluon_swiglu.swiglu(gate_up.cuda(), on_gpu.ends, group)
            backward = gluon_swiglu.swiglu_backward(*arguments, group)
        pairs = [
            ((codes, scales), moe_standins.quantized(forward, 1, group), False),
            (backward[0:2], moe_standins.quantized(plain[0][:end].cpu(), 1, group), False),
            (backward[2:4], moe_standins.quantized(plain[0][:end].cpu(), 0, group), True),
            (backward[4:6], moe_standins.quantized(plain[4][:end].cpu(), 0, group), True),
        ]
        for (actual_codes, actual_scales), (expected_codes, expected_scales), transposed in pairs:
            if transposed:
                actual_codes, actual_scales = actual_codes[:, :end], actual_scales[:, : end // 32]
            actual = actual_codes[: len(expected_codes)], actual_scales[: len(expected_scales)]
            assert_nearly_same(actual, (expected_codes, expected_scales))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_experts(recipe: str, dtype: torch.dtype) -> None:
    def run(**arguments) -> Tensor:
        with poisoned_empty():
            return moe.experts(backend="fused", **arguments)

    for case in (
        layer(700, 256, 384, 5, 3),
        layer(100, 96, 128, 7, 2, "one"),
        layer(1, 128, 128, 4, 2),
        layer(0, 128, 128, 4, 2),
    ):
        # poisoned_empty shows what a kernel does not write; rows behind the last end stay poisoned and must not matter.
        compare(run, *case, recipe, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_gpu_operator_passes_opcheck(recipe: str) -> None:
    chosen, leaves, _ = layer(60, 96, 128, 3, 2)
    x, weights, gate_up, down = (value.cuda() for value in leaves.values())
    arguments = (x, chosen.cuda(), weights, gate_up, down, fused.GROUPS[recipe], torch.bfloat16, True)
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

    for actual, expected in zip(run("fused"), run("reference"), strict=True):
        assert actual.dtype is expected.dtype
        # Both quantise, at other places: their errors add up to 3 dB more than one's.
        assert sqnr_db(actual, expected) > (35 if recipe == "none" else 19)


@pytest.mark.gpu
def test_gpu_experts_are_bitwise_repeatable_and_do_not_sync() -> None:
    chosen, leaves, upstream = layer(500, 128, 256, 6, 2)
    own = {name: value.cuda().requires_grad_() for name, value in leaves.items()}
    chosen, upstream = chosen.cuda(), upstream.cuda()

    def run() -> list[Tensor]:
        y = moe.experts(chosen=chosen, recipe="mxfp8_g128", backend="fused", **own)
        return [y, *torch.autograd.grad(y, list(own.values()), upstream)]

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_breakdown_knows_our_kernels_and_pytorchs() -> None:
    from kernels.moe.breakdown import kind_of

    kinds = {
        "gather_kernel": "gather and quantise",
        "quantize_kernel": "weights",
        "backward_kernel": "SwiGLU",
        "_kernel": "products",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>": "products",
        "triton_poi_fused_mul_silu_3": "SwiGLU",
        "void at::native::radixSortKVInPlace<2, -1, 32>": "places",
        "void at::native::vectorized_elementwise_kernel<4>": "other",
    }
    assert {kernel: kind_of(kernel) for kernel in kinds} == kinds

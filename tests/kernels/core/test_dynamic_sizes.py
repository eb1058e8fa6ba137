"""Every public operator in compiled code of sizes that are not fixed: Dynamo and AOT autograd trace it whole."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import kernels
from kernels import attention, gdpa, ikbo, jagged, moe, mxfp8, tokens

LONGEST = 16
BOTH = {"max_q": LONGEST, "max_k": LONGEST}
TREE = {"max_candidates": [LONGEST, LONGEST], "max_k": [LONGEST, LONGEST]}
BELOW = {"max_candidates": LONGEST, "max_k": LONGEST}


def real(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def rows(total: int, count: int) -> Tensor:
    return torch.arange(count + 1) * total // count


def pairs(n: int, b: int) -> int:
    return int(rows(n, b).diff().square().sum())


def heads(n: int, count: int = 2) -> tuple[Tensor, ...]:
    return tuple(real(n, 2, 8) for _ in range(count))


def chosen(n: int) -> Tensor:
    return torch.stack([torch.arange(n) % 3, (torch.arange(n) + 1) % 3], 1)


def combined(x: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
    values, order = moe.gather(x, selected)
    return moe.combine(values, weights, order)


def moved(out: Tensor, values: Tensor, places: Tensor) -> Tensor:
    out = out.clone()
    tokens.move_rows_(out, values, places)
    return out


def zeroed(x: Tensor, condition: Tensor) -> Tensor:
    x = x.clone()
    tokens.zero_unless_(x, condition)
    return x


def outer(x: Tensor, y: Tensor, o: Tensor, array: Tensor) -> Tensor:
    squares = jagged.squared_offsets(o)
    return jagged.jagged_jagged_bmm_jagged_out(x, y, o, squares, array.shape[0], LONGEST)


Case = tuple[Callable[..., Any], Callable[[int, int], tuple[Any, ...]]]
CASES: dict[str, Case] = {
    # name of the operator, maybe with a variant behind a colon: what is compiled, and inputs of n values in b rows
    **{
        name: (getattr(jagged, name), lambda n, b: (real(n, 4), rows(n, b)))
        for name in ("segment_sum", "segment_mean", "segment_max", "jagged_softmax", "jagged_flip")
    },
    "jagged_to_padded": (lambda x, o: jagged.jagged_to_padded(x, o, LONGEST), lambda n, b: (real(n, 4), rows(n, b))),
    "padded_to_jagged": (
        lambda x, o, like: jagged.padded_to_jagged(x, o, like.shape[0]),
        lambda n, b: (real(b, LONGEST, 4), rows(n, b), real(n)),
    ),
    "jagged_concat": (jagged.jagged_concat, lambda n, b: (real(n, 4), rows(n, b), real(n + 3, 4), rows(n + 3, b))),
    "jagged_index_select": (
        lambda x, o, picked, like: jagged.jagged_index_select(x, o, picked, like.shape[0]),
        lambda n, b: (real(n, 4), rows(n, b), torch.arange(b), real(n)),
    ),
    "jagged_last": (lambda x, o: jagged.jagged_last(x, o, 2), lambda n, b: (real(n, 4), rows(n, b))),
    "jagged_slice": (
        lambda x, o, start, length: jagged.jagged_slice(x, o, start, length, o.shape[0] - 1),
        lambda n, b: (real(n, 4), rows(n, b), torch.zeros(b, dtype=torch.int64), torch.ones(b, dtype=torch.int64)),
    ),
    "jagged_elementwise": (
        lambda x, y: jagged.jagged_elementwise(x, y, "mul", "silu"),
        lambda n, b: (real(n, 4), real(n, 4)),
    ),
    "jagged_dense_elementwise": (
        lambda x, o, y: jagged.jagged_dense_elementwise(x, o, y, "mul", "silu"),
        lambda n, b: (real(n, 4), rows(n, b), real(b, 4)),
    ),
    "jagged_linear": (
        lambda *tensors: jagged.jagged_linear(*tensors, "silu"),
        lambda n, b: (real(n, 4), rows(n, b), real(3, 4), real(3), real(b, 3)),
    ),
    "jagged_dense_bmm": (
        lambda x, o, y: jagged.jagged_dense_bmm(x, o, y, LONGEST),
        lambda n, b: (real(n, 4), rows(n, b), real(b, 4, 3)),
    ),
    "jagged_low_rank": (
        lambda x, o, left, weight: jagged.jagged_low_rank(x, o, left, weight, LONGEST),
        lambda n, b: (real(n, 4), rows(n, b), real(b, 2, 4), real(5, 2)),
    ),
    "jagged_jagged_bmm": (
        lambda x, y, o: jagged.jagged_jagged_bmm(x, y, o, LONGEST),
        lambda n, b: (real(n, 4), real(n, 3), rows(n, b)),
    ),
    "jagged_jagged_bmm_jagged_out": (outer, lambda n, b: (real(n, 4), real(n, 4), rows(n, b), real(pairs(n, b)))),
    "array_jagged_bmm_jagged_out": (
        lambda a, y, o: jagged.array_jagged_bmm_jagged_out(a, y, o, jagged.squared_offsets(o), LONGEST, True),
        lambda n, b: (real(pairs(n, b)), real(n, 4), rows(n, b)),
    ),
    "jagged2_softmax": (
        lambda a, o, like: jagged.jagged2_softmax(a, o, jagged.squared_offsets(o), like.shape[0]),
        lambda n, b: (real(pairs(n, b)), rows(n, b), real(n)),
    ),
    "squared_offsets": (jagged.squared_offsets, lambda n, b: (rows(n, b),)),
    "jagged_attention": (
        lambda q, k, v, o, p: attention.jagged_attention(q, k, v, o, p, **BOTH),
        lambda n, b: (*heads(n, 1), *heads(n + 5), rows(n, b), rows(n + 5, b)),
    ),
    "jagged_attention:masked": (
        lambda q, k, v, o, t: attention.jagged_attention(
            q, k, v, o, o, causal=True, window=3, num_targets=t, contextual=1, **BOTH
        ),
        lambda n, b: (*heads(n, 3), rows(n, b), torch.ones(b, dtype=torch.int64)),
    ),
    "jagged_attention:biased": (
        lambda q, k, v, o, position, time, at: attention.jagged_attention(
            q, k, v, o, o, causal=True, position_bias=position, time_bias=time, q_times=at, k_times=at, **BOTH
        ),
        lambda n, b: (*heads(n, 3), rows(n, b), real(2, 2 * LONGEST - 1), real(2, 8), torch.arange(n)),
    ),
    "jagged_attention:sinks": (
        lambda q, k, v, o, sinks: attention.jagged_attention(q, k, v, o, o, sinks=sinks, return_lse=True, **BOTH),
        lambda n, b: (*heads(n, 3), rows(n, b), real(2)),
    ),
    "attention_pool": (
        lambda q, v, o, p: attention.attention_pool(q, v, o, p, scale=0.3, **BOTH),
        lambda n, b: (real(2 * b, 2, 8), real(n, 8), rows(2 * b, b), rows(n, b)),
    ),
    "time_bucket": (lambda seconds: attention.time_bucket(seconds, 8, 0.3), lambda n, b: (torch.arange(n),)),
    "gdpa": (
        lambda q, k, v, o: gdpa.gdpa(q, k, v, o, o, activation=["gelu", "silu"], score_scale=0.3, window=2, **BOTH),
        lambda n, b: (*heads(n, 3), rows(n, b)),
    ),
    "gdpa:one query": (
        lambda q, k, v, p: gdpa.gdpa(q, k, v, None, p, max_q=4, max_k=LONGEST, activation="gelu", score_scale=0.3),
        lambda n, b: (real(4, 2, 8), *heads(n), rows(n, b)),
    ),
    "gdpa:dense keys": (
        lambda q, k, v, o: gdpa.gdpa(q, k, v, o, None, max_q=LONGEST, max_k=4, activation="gelu", score_scale=0.3),
        lambda n, b: (*heads(n, 1), real(b, 4, 2, 8), real(b, 4, 2, 8), rows(n, b)),
    ),
    "gdpa:shared keys": (
        lambda q, k, v, o, p, i: gdpa.gdpa(q, k, v, o, p, kv_index=i, activation="gelu", score_scale=0.3, **BOTH),
        lambda n, b: (*heads(n, 3), rows(n, 2 * b), rows(n, b), torch.arange(b).repeat_interleave(2)),
    ),
    "layer_norm": (lambda q: gdpa.layer_norm(q, heads=2, beside=True), lambda n, b: (real(n, 4, 8),)),
    "add_norms": (lambda x, q: gdpa.add_norms(x, q, norm=True), lambda n, b: (real(n, 4, 8), real(n, 4, 8))),
    "expand_rows": (
        lambda x, o, like: ikbo.expand_rows(x, o, like.shape[0]),
        lambda n, b: (real(b, 3), rows(n, b), real(n)),
    ),
    "joint_attention": (
        lambda q, k, v, o, p: ikbo.joint_attention(q, k, v, [o], p, max_q=[LONGEST], max_k=LONGEST, sizes=[q.shape[0]]),
        lambda n, b: (*heads(n, 1), *heads(n + 2), rows(n, b), rows(n + 2, b)),
    ),
    "linear_compression": (
        lambda c, r, wc, wr, o: ikbo.linear_compression(c, r, wc, wr, o),
        lambda n, b: (real(n, 3, 4), real(b, 5, 4), real(2, 3), real(2, 5), rows(n, b)),
    ),
    "nested_offsets": (ikbo.nested_offsets, lambda n, b: (rows(2 * b, b), rows(n, 2 * b))),
    "stacked_linear": (
        lambda x, y, w, u: ikbo.stacked_linear([x, y], [w, u]),
        lambda n, b: (real(n, 4), real(n + 1, 4), real(3, 4), real(3, 4)),
    ),
    "target_attention": (
        lambda q, k, v, o, p: ikbo.target_attention(q, k, v, o, p, **BELOW),
        lambda n, b: (real(n, 3, 2, 8), *heads(n + 2), rows(n, b), rows(n + 2, b)),
    ),
    "tree_attention": (
        lambda q, k, v, m, w, o, p, s, t: ikbo.tree_attention(q, [k, m], [v, w], [o, p], [s, t], **TREE),
        lambda n, b: (
            *(real(n, 1, 2, 8), *heads(n + 2), *heads(n + 1)),
            *(rows(2 * b, b), rows(n, 2 * b), rows(n + 2, b), rows(n + 1, 2 * b)),
        ),
    ),
    **{
        f"experts:{recipe}": (
            lambda *tensors, recipe=recipe: moe.experts(*tensors, recipe=recipe),
            lambda n, b: (real(n, 32), chosen(n), real(n, 2), real(3, 64, 32), real(3, 32, 32)),
        )
        for recipe in ("bf16", "mxfp8")
    },
    "top_k": (lambda scores: moe.top_k(scores, 2), lambda n, b: (torch.randn(n, 5),)),
    "swiglu": (moe.swiglu, lambda n, b: (real(n, 8),)),
    "gather": (combined, lambda n, b: (real(n, 4), chosen(n), real(n, 2))),
    **{
        f"linear:{recipe}": (
            lambda x, w, bias, recipe=recipe: mxfp8.linear(x, w, bias, recipe=recipe),
            lambda n, b: (real(n, 32), real(64, 32), real(64)),
        )
        for recipe in ("bf16", "mxfp8")
    },
    "float32_linear": (mxfp8.float32_linear, lambda n, b: (real(n, 32), real(8, 32), real(8))),
    "grouped_mm": (
        mxfp8.grouped_mm,
        lambda n, b: (real(n, 32), real(3, 32, 32), torch.tensor([n // 3, 2 * n // 3, n], dtype=torch.int32)),
    ),
    "quantize:mxfp8": (lambda x: mxfp8.dequantize(mxfp8.quantize(x)), lambda n, b: (torch.randn(n, 64),)),
    "silu_mlp:mxfp8": (
        lambda *tensors: mxfp8.silu_mlp(*tensors, recipe="mxfp8"),
        lambda n, b: (real(n, 32), real(64, 32), real(64), real(32, 64), real(32), real(n, 32)),
    ),
    "swizzle_scales": (
        lambda scales: mxfp8.unswizzle_scales(mxfp8.swizzle_scales(scales), *scales.shape),
        lambda n, b: (torch.randint(0, 255, (n, 4), dtype=torch.uint8),),
    ),
    "activate": (
        lambda x, bias, factor: tokens.activate(x, bias, "silu", factor),
        lambda n, b: (real(n, 4), real(4), real(n, 4)),
    ),
    "add_rms_norm": (tokens.add_rms_norm, lambda n, b: (real(n, 4), real(n, 4))),
    "biased_linear": (tokens.biased_linear, lambda n, b: (real(n, 4), real(3, 4), real(3))),
    "concat_finite": (lambda *parts: tokens.concat_finite(parts), lambda n, b: (torch.randn(n, 4), torch.randn(b, 4))),
    "concat_tokens": (
        lambda x, y, z: tokens.concat_tokens([x, y], z),
        lambda n, b: (real(n, 2, 4), real(n, 3, 4), real(n, 5, 4)),
    ),
    "move_rows_": (moved, lambda n, b: (torch.zeros(b, 4), torch.randn(n, 4), torch.arange(b))),
    "place_rows": (
        lambda x, y, places: tokens.place_rows([x, y], places),
        lambda n, b: (real(n, 4), real(b, 4), torch.randperm(n + b)),
    ),
    "project_qkv": (
        lambda x, weight, cos, sin: tokens.project_qkv(x, weight, cos, sin, heads=2),
        lambda n, b: (real(n, 8), real(24, 8), torch.randn(n, 2), torch.randn(n, 2)),
    ),
    "rms_norm": (lambda x: tokens.rms_norm(x, dtype=torch.bfloat16, twice=True), lambda n, b: (real(n, 8),)),
    "rotate": (tokens.rotate, lambda n, b: (real(n, 2, 4), torch.randn(n, 2), torch.randn(n, 2))),
    "rotate_qkv": (tokens.rotate_qkv, lambda n, b: (real(n, 3, 2, 4), torch.randn(n, 2), torch.randn(n, 2))),
    "silu_mlp": (tokens.silu_mlp, lambda n, b: (real(n, 4), real(6, 4), real(6), real(4, 6), real(4))),
    "split_tokens": (lambda x: tokens.split_tokens(x, [1, 2]), lambda n, b: (real(n, 3, 4),)),
    "unbind": (tokens.unbind, lambda n, b: (real(n, 4),)),
    "zero_unless_": (zeroed, lambda n, b: (torch.randn(n, 4), torch.tensor(True))),
}  # fmt: skip
SLOW = {name for name in CASES if ":" in name and name != "linear:bf16"} | {
    *("attention_pool", "joint_attention", "target_attention", "tree_attention", "swizzle_scales", "jagged2_softmax"),
    *("jagged_dense_bmm", "jagged_low_rank", "jagged_jagged_bmm", "jagged_jagged_bmm_jagged_out", "segment_max"),
    "array_jagged_bmm_jagged_out",
}
"""Operators whose tracing takes a second or more."""
OF_OTHERS = {"combine", "dequantize", "unswizzle_scales"}
"""Operators that the case of another one has, too."""
OF_THE_HOST = {
    *("checked_bias", "checked_structure", "packed_features", "unpacked_features", "padded_bias", "pools", "is_fused"),
    *("check_lengths", "check_offsets", "check_recipe", "experts_execution", "grouped_execution", "linear_execution"),
    *(
        "linear_gains",
        "pair_flops",
        "serves_triton",
        "multiplies_expert_codes",
        "multiplies_grouped_codes",
        "multiplies_linear_codes",
        "has_rows",
    ),
}
"""Functions that say what an operator would do, or that operators call."""
READ_BACK = {"jagged_attention:masked", "gdpa:shared keys", "experts:bf16", "experts:mxfp8", "grouped_mm"}
"""Cases whose specification has sizes from values on the device, which no plain trace knows."""


def results(function: Callable[..., Any], inputs: tuple[Any, ...], gradients: bool) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    made = function(*leaves)
    outputs = [each for each in (made if isinstance(made, tuple | list) else [made]) if isinstance(each, Tensor)]
    learning = [each for each in outputs if each.requires_grad]
    if gradients and learning:
        cotangents = [torch.linspace(-1, 1, each.numel()).view(each.shape).to(each.dtype) for each in learning]
        wanted = [each for each in leaves if each.requires_grad]
        found = torch.autograd.grad(learning, wanted, cotangents, allow_unused=True)
        outputs += [each for each in found if each is not None]
    return outputs


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in SLOW)) for name in CASES])
def test_sizes_are_not_fixed(name: str, backend: str) -> None:
    function, make = CASES[name]
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for n, b in [(7, 3), (12, 4)][: 1 if backend == "eager" else 2]:
        torch.manual_seed(n)
        inputs = make(n, b)
        expected, ours = (results(each, inputs, backend != "eager") for each in (function, compiled))
        # The same operators in the same order; inside of a sum AOT autograd may choose another one.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(CASES.keys() - READ_BACK))
def test_sizes_are_symbols_of_an_export(name: str) -> None:
    """Which has no hash for them, unlike a compiler's trace."""
    function, make = CASES[name]
    make_fx(lambda *inputs: function(*inputs), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*make(7, 3))


def test_every_operator_has_a_case() -> None:
    families = [getattr(kernels, name) for name in kernels.__all__ if name not in ("defined_in", "dispatch")]
    public = itertools.chain.from_iterable((getattr(each, name) for name in each.__all__) for each in families)
    there = {each.__name__ for each in public if inspect.isfunction(each)}
    assert there == {name.partition(":")[0] for name in CASES} | OF_OTHERS | OF_THE_HOST

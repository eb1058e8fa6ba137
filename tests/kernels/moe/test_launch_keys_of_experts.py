"""Calls with one key are calls that Triton would compile the same kernel for: experts and linear compression."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.core.launch import Launcher
from kernels.ikbo.hopper import lce_forward
from kernels.ikbo.lce_torch import aligned_rows
from kernels.moe.hopper import gather_quantized as hopper_gather_quantized
from kernels.moe.hopper import swiglu as hopper_swiglu
from kernels.moe.hopper import swiglu_product, swiglu_product_bf16
from kernels.moe.hopper import swiglu_quantized as hopper_swiglu_quantized
from kernels.moe.triton import route
from kernels.moe.triton import top_k as triton_top_k
from kernels.mxfp8.grouped import MATRIX, TABLES, Quantized, form_of
from kernels.mxfp8.hopper.quantize.int8 import empty_int8
from tests.kernels.core import test_launch_keys
from tests.kernels.core.test_launch_keys import shifted

hits = test_launch_keys.hits


def _zeros(shape: tuple[int, ...], form: int) -> Quantized:
    *lines, length = shape
    scales = torch.zeros(length // 128, math.prod(lines), dtype=TABLES[form])
    return Quantized(torch.zeros(shape, dtype=torch.float8_e4m3fn), scales, 128)


def test_routed_experts(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    for module in (swiglu_product, swiglu_product_bf16):
        monkeypatch.setattr(module, "processors", lambda device: 132)
        monkeypatch.setattr(module, "counter", lambda device: torch.zeros(1, dtype=torch.int32))
    for (tokens, top_k, experts), (width, hidden), dtype, elsewhere, group in itertools.product(
        ((1, 1, 1), (64, 2, 4), (1000, 2, 4), (1024, 2, 16)),
        ((128, 256), (256, 128), (2048, 1024)),
        (torch.bfloat16, torch.float32),
        (False, True),
        (32, 128),
    ):
        selected, weights = torch.zeros(tokens, top_k, dtype=torch.int64), torch.zeros(tokens, top_k, dtype=dtype)
        x = torch.zeros(tokens, width + 8 * elsewhere).bfloat16()[:, :width]
        if elsewhere:
            selected, weights = shifted(selected), shifted(weights)
        triton_top_k.top_k(torch.zeros(tokens, experts, dtype=dtype), top_k)
        routed = route.permutation(selected, experts)
        count = len(routed.selections)
        for columns in (False, True):
            hopper_gather_quantized.gather_quantized(x, routed, group, columns, (form_of(group, False), MATRIX))
        gate_up, grad = torch.zeros(count, 2 * hidden).bfloat16(), torch.zeros(count, hidden).bfloat16()
        rest = (routed.selections, weights, routed.ends)
        weight = torch.zeros(experts, 2 * hidden, width).bfloat16()
        swiglu_product_bf16.hidden(torch.zeros(count, width).bfloat16(), weight, routed.ends, elsewhere)
        hopper_swiglu.swiglu(gate_up, routed.ends)
        *_, partial = hopper_swiglu.swiglu_backward(gate_up, grad, *rest, elsewhere)
        results = hopper_swiglu_quantized.empty_results(count, hidden, group, elsewhere, gate_up.device)
        half = count // 256 * 128
        for part in (slice(0, half), slice(half, count)):
            hopper_swiglu_quantized.swiglu_quantized(gate_up[part], routed.ends, group, results, part.start)
        if group == 128:
            swiglu_product.hidden(
                _zeros((count, width), form_of(group, False)),
                _zeros((experts, 2 * hidden, width), form_of(group, True))._replace(differ=torch.zeros(1).int()),
                routed.ends,
                elsewhere,
            )
        kept = empty_int8(count, 2 * hidden, gate_up.device)
        form = form_of(group, True)
        hopper_swiglu_quantized.swiglu_quantized_backward(*kept, grad, *rest, group, elsewhere, form)
        route.combine(grad, routed.rows, weights if elsewhere else None, dtype)
        route.collect(partial, routed.rows, dtype)
    launchers = {each for name, each in test_launch_keys.all_launchers().items() if name.startswith("kernels.moe.")}
    assert len(launchers) >= 11
    assert all(hits[launcher] for launcher in launchers), hits


def test_linear_compression(monkeypatch: pytest.MonkeyPatch, hits: Counter[Launcher]) -> None:
    def prepare(
        weight: Tensor, w_user: Tensor, offsets: Tensor, num_entries: int, num_flags: int
    ) -> tuple[Tensor, ...]:
        owners, flags = torch.zeros(num_entries, dtype=torch.int32), torch.zeros(num_flags, dtype=torch.int32)
        return aligned_rows(weight, 128), aligned_rows(w_user, 128), owners, flags

    monkeypatch.setattr(lce_forward, "processors", lambda device: 132)
    monkeypatch.setattr(lce_forward, "prepare", prepare)
    for (entries, users), rows, depth, dtype in itertools.product(
        ((1, 0), (1, 1), (16, 16), (500, 7), (512, 500)), (130, 433), (41, 64), (torch.float16, torch.bfloat16)
    ):
        x, user = torch.zeros(entries, depth, 256, dtype=dtype), torch.zeros(users, 2 * depth, 256, dtype=dtype)
        weight, w_user = torch.zeros(rows, depth, dtype=dtype), torch.zeros(rows, 2 * depth, dtype=dtype)
        lce_forward.compress(x, weight)
        lce_forward.compress(x, weight, user, w_user, torch.zeros(users + 1, dtype=torch.int64))
    assert hits[lce_forward._launch_forward]

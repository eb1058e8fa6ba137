"""The attention backward of rows that fit into one tile: interpreted, compiled, and run beside the Hopper kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels.attention.hopper import backward as hopper_attention_backward
from kernels.attention.triton import short as triton_short
from kernels.attention.triton import short_backward
from kernels.core.mask import Mask
from kernels.core.rows import Rows
from kernels.testing import compile_ahead
from tests.kernels.attention.test_attention_hopper_backward import check, formula
from tests.kernels.core.interpreting import interpret


@pytest.mark.parametrize("causal", [False, True])  # with causal also parts of wider gradients
def test_rows_of_one_tile_are_differentiated_by_themselves(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    interpret(monkeypatch, short_backward, triton_short)
    q_lengths, k_lengths = [0, 3, 17, 64, 65, 33, 12, 5], [5, 0, 30, 64, 3, 9, 70, 60]
    short = torch.tensor([max(row) <= 64 for row in zip(q_lengths, k_lengths, strict=True)])
    queries, keys = (short.repeat_interleave(torch.tensor(lengths)) for lengths in (q_lengths, k_lengths))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), heads, 32, generator=generator)
        for lengths, heads in ((q_lengths, 6), (k_lengths, 3), (k_lengths, 3), (q_lengths, 6))
    )
    rows = list(zip(q_lengths, k_lengths, strict=True))
    out, lse, expected = formula(q, k, v, grad, rows, 0.3, causal, (-1, -1))
    call = [Rows(torch.tensor([0, *lengths]).cumsum(0), 70) for lengths in (q_lengths, k_lengths)]
    results = [torch.full_like(x, math.nan) for x in (q, k, v)]
    if causal:
        results[2] = torch.full((len(v), 3, *v.shape[1:]), math.nan)[:, 2]
    short_backward.backward(grad, q, k, v, out, lse, *results, *call, 0.3, Mask(causal), beside=False)
    for result, oracle, written in zip(results, expected, (queries, keys, keys), strict=True):
        torch.testing.assert_close(result[written].double(), oracle[written], atol=1e-4, rtol=1e-4)
        assert result[~written].isnan().all()


@pytest.mark.parametrize(("head_dim", "group", "window", "spill_bytes"), [(128, 1, False, 64), (64, 2, True, 1024)])
def test_three_programs_of_short_rows_fit_on_a_multiprocessor(
    head_dim: int, group: int, window: bool, spill_bytes: int
) -> None:
    kernel = short_backward.attention_short_backward_kernel
    types = {"lse": "*fp32", "q_offsets": "*i64", "k_offsets": "*i32", "scale": "fp32"}
    types |= dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), "*bf16")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if not name.isupper()}
    built = compile_ahead(
        kernel,
        signature,
        {
            "KEY_HEADS": 2,
            "GROUP": group,
            "D": head_dim,
            "WINDOWED": window,
            "BESIDE": True,
            "DK_PARTS": 1,
            "DV_PARTS": group,
        },
        target="sm_90",
        divisible_by_16=[name for name in signature if name.startswith("stride")],
        maxnreg=triton_short.BACKWARD_REGISTERS,
        **triton_short.OPTIONS,
    )
    assert built.contains("wgmma.mma_async")
    assert built.contains("griddepcontrol.wait")
    assert 3 * (built.shared_bytes + 1024) <= 227 * 1024
    assert built.spill_bytes <= spill_bytes


SHORT = [min(int(8 / u), 300) for u in torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (5, 3)},
        {"heads": (6, 2), "head_dim": 64},
        {"heads": (4, 4), "packed": True, "offsets_dtype": torch.int64},
        {"dtype": torch.float16, "heads": (3, 3)},
    ],
    ids=str,
)
@pytest.mark.parametrize("longest", [300, 64])
def test_gradients_of_short_rows(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], longest: int) -> None:
    monkeypatch.setattr(hopper_attention_backward, "likely_short", lambda *numbers: 64)
    q_lengths = [min(length, longest) for length in SHORT]
    k_lengths = q_lengths if "packed" in options else [length * (length % 7 > 0) for length in q_lengths[::-1]]
    check(q_lengths, k_lengths, **options)

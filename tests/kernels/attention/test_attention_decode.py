"""Attention of a few queries a row over many keys: interpreted in float32, compiled for absent chips, and on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.attention import jagged_attention
from kernels.core import dispatch
from kernels.testing import check_gradients, compile_ahead, poisoned_empty, serving
from tests.kernels.attention.attention_cases import gradients, inputs_of, outputs, with_lse
from tests.kernels.core.devices import SHARED_LIMITS, on_chips
from tests.kernels.jagged.jagged_problems import offsets_of

pytest.importorskip("triton")

# Queries and keys: no queries, no keys, neither, few of both.
LENGTHS = [2, 0, 4, 0, 1, 3], [300, 17, 0, 0, 5, 64]


def check(heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, device: str, backend: str) -> None:
    q_offsets, k_offsets = offsets_of(LENGTHS[0]).to(device), offsets_of(LENGTHS[1], torch.int32).to(device)
    attend = partial(jagged_attention, q_offsets=q_offsets, k_offsets=k_offsets, max_q=4, max_k=300, scale=-0.2)
    for sinks, beside in ((False, partial), (True, with_lse)):
        ours, expected = (beside(partial(attend, backend=name)) for name in (backend, "reference"))
        inputs = inputs_of(q_offsets, k_offsets, heads, widths, dtype, sinks=sinks)
        with poisoned_empty():
            check_gradients(ours, expected, inputs, outputs(300), gradients(300))


@pytest.mark.parametrize(("heads", "widths"), [((1, 1), (16, 16)), ((6, 2), (24, 40)), ((2, 1), (64, 64))], ids=str)
def test_in_the_interpreter(heads: tuple[int, int], widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.attention.triton import decode as triton_attention_decode
    from kernels.attention.triton import tile
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_attention_decode, tile)
    monkeypatch.setitem(dispatch._registry, "jagged_attention", serving("jagged_attention", "decode"))
    dispatch._chosen.clear()
    check(heads, widths, torch.float32, "cpu", "decode")
    dispatch._chosen.clear()


@pytest.mark.parametrize(
    ("name", "width", "rows", "target"),
    on_chips([("forward", 64, 4), ("backward", 64, 4), ("backward", 128, 32), ("forward", 256, 32)]),
)
def test_compiles_within_registers(name: str, width: int, rows: int, target: str) -> None:
    from kernels.attention.triton import decode

    constants = {"KV_HEADS": 2, "GROUP": 1, "HEAD_DIM": width, "VALUE_DIM": width, **decode.tiling(width, width, rows)}
    kernel = getattr(decode, f"attention_decode_{name}_kernel")
    strides = [argument for argument in kernel.arg_names if argument.endswith(("_token", "_head"))]
    types = {"lse": "*fp32", "q_offsets": "*i64", "k_offsets": "*i64", "scale": "fp32"}
    types |= dict.fromkeys([*strides, "total_q"], "i32")
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names if argument not in constants}
    compiled = compile_ahead(
        kernel, signature, constants, target=target, num_warps=4, num_stages=3, divisible_by_16=strides
    )
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes <= SHARED_LIMITS[target]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGPU:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        ("heads", "widths"),
        [((1, 1), (16, 16)), ((6, 2), (24, 40)), ((2, 2), (64, 64)), ((8, 1), (128, 128)), ((2, 1), (256, 200))],
        ids=str,
    )
    def test_matches_the_reference(self, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> None:
        check(heads, widths, dtype, "cuda", "decode")

    def test_views_bits_and_rows_that_do_not_exist(self) -> None:
        q_offsets, k_offsets = offsets_of([2] * 50).cuda(), offsets_of([n * 7 for n in range(50)]).cuda()
        fused = torch.randn(int(k_offsets[-1]), 2, 2, 64, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(100, 2, 64, device="cuda", dtype=torch.bfloat16)
        attend = partial(jagged_attention, max_q=2, max_k=343, backend="decode")
        results = []
        for keys, values in ((fused[:, 0], fused[:, 1]), (fused[:, 0].contiguous(), fused[:, 1].contiguous())) * 2:
            leaves = [x.detach().requires_grad_() for x in (q, keys, values)]
            out = attend(*leaves, q_offsets, k_offsets)
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        none = torch.zeros(1, dtype=torch.int64, device="cuda")
        assert attend(q[:0], fused[:0, 0], fused[:0, 1], none, none).shape == (0, 2, 64)

    def test_opcheck(self) -> None:
        from kernels.attention.triton import operators  # noqa: F401  defines the operator

        q_offsets, k_offsets = offsets_of([2, 1]).cuda(), offsets_of([5, 9]).cuda()
        q, k, v = (torch.randn(n, 2, 16, device="cuda", dtype=torch.float16, requires_grad=True) for n in (3, 14, 14))
        operator = torch.ops.gemsmith.jagged_attention_decode.default
        torch.library.opcheck(operator, (q, k, v, q_offsets, k_offsets, 2, 9, 0.25, False, -1, -1))

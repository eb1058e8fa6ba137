"""Row lengths are checked on the device: in one launch, or by the schedules of the Hopper attentions and GDPA."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import interpreter_builder

from kernels.core import checks, lengths
from kernels.ikbo.triton import groups
from kernels.testing import compile_ahead
from tests.kernels.core.devices import SHARED_LIMITS
from tests.kernels.core.interpreting import interpret

TOO_LONG = """
import torch
from kernels.attention import jagged_attention
from kernels.gdpa import gdpa
from kernels.ikbo import joint_attention, tree_attention
from kernels.core.checks import check_lengths

offsets = torch.tensor([0, 200, 500], device="cuda")
x = torch.randn(500, 1, 64, device="cuda", dtype=torch.bfloat16)
{call}
torch.cuda.synchronize()
print("nothing was found")
"""


@pytest.mark.parametrize("stride", [1, 3])
def test_lengths_are_compared_with_the_maximum(monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    interpret(monkeypatch, lengths)
    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
    offsets = torch.zeros(stride * 1100, dtype=torch.int32)[::stride]
    offsets[-1] = 7
    lengths.assert_lengths(offsets, 7)
    lengths.assert_lengths(offsets, 2**40)
    with pytest.raises(InterpreterError, match="longer than"):
        lengths.assert_lengths(offsets, 6)


def test_layers_with_the_same_offsets_check_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(checks, "_runs_triton", lambda device: True)
    monkeypatch.setattr(lengths, "assert_lengths", lambda offsets, maximum: checked.append(maximum))
    offsets = torch.tensor([0, 3])
    for maximum in (3, 3, 4, 3):
        checks.check_lengths(offsets, maximum, "max_length")
    assert checked == [3, 4]
    offsets[1] = 2
    checks.check_lengths(offsets, 3, "max_length")
    assert checked == [3, 4, 3]


def test_lengths_of_all_groups_are_compared_with_their_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, groups)
    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
    offsets, others = torch.tensor([0, 3, 7]), torch.tensor([0, 9, 9])
    groups.joined_groups([offsets, others], offsets, (4, 9), 4)
    for most, longest in (((3, 9), 4), ((4, 8), 4), ((4, 9), 3)):
        with pytest.raises(InterpreterError, match="longer than"):
            groups.joined_groups([offsets, others], offsets, most, longest)


@pytest.mark.parametrize("target", SHARED_LIMITS)
@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
def test_the_check_compiles_to_an_assertion(offsets: str, target: str) -> None:
    signature = {"offsets": offsets} | dict.fromkeys(("num_rows", "stride", "maximum"), "i32")
    options = {"debug": True, "sanitize_overflow": False}
    compiled = compile_ahead(lengths._lengths_kernel, signature, {"ROWS": 512}, target=target, **options)
    assert "__assertfail" in compiled.ptx
    assert compiled.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        'check_lengths(offsets, 299, "max_length")',
        "jagged_attention(x, x, x, offsets, offsets, max_q=299, max_k=300)",
        "jagged_attention(x, x, x, offsets, offsets, max_q=300, max_k=299)",
        "joint_attention(x, x, x, [offsets], offsets, max_q=[299], max_k=300, sizes=[500])",
        "joint_attention(x, x, x, [offsets], offsets, max_q=[300], max_k=299, sizes=[500])",
        "tree_attention(x[:, None], [x], [x], [offsets], [offsets], max_candidates=[299], max_k=[300])",
        "tree_attention(x[:, None], [x], [x], [offsets], [offsets], max_candidates=[300], max_k=[299])",
        "tree_attention(x[:, None], [x], [x], [offsets], [offsets], max_candidates=[300], max_k=[299], "
        "backend='reference')",
        "gdpa(x, x, x, offsets, offsets, max_q=299, max_k=300, score_scale=1.0)",
        "gdpa(x, x, x, offsets, offsets, max_q=300, max_k=299, score_scale=1.0)",
        "gdpa(x, x, x, offsets, offsets, max_q=60, max_k=64, score_scale=1.0)",
    ],
)
def test_a_longer_row_is_a_device_assertion(call: str) -> None:
    """In a process of its own, because a CUDA context does not survive it."""
    run = subprocess.run(
        [sys.executable, "-c", TOO_LONG.format(call=call)], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "nothing was found" not in run.stdout
    assert "longer than" in run.stdout + run.stderr

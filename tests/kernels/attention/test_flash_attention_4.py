"""FlashAttention 4 as a backend, without it and without a GPU: where it serves, and what it is given.

Those with it are in `test_jagged_attention_triton`.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import attention
from kernels.attention import jagged_attention
from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.core.mask import checked_mask
from kernels.core.rows import Rows
from kernels.testing import check_gradients
from tests.kernels.attention.attention_cases import inputs_of, outputs
from tests.kernels.jagged.jagged_problems import offsets_of

FACTS: dict[str, Any] = {
    "device": "cuda",
    "capability": (9, 0),
    "dtype": torch.bfloat16,
    "head_dim": 128,
    "value_dim": 128,
    "masked": True,
    "same_offsets": True,
    "block_local": False,
    "biased": False,
    "positive_scale": True,
    "few_queries": False,
    "query_rows": 64,
    "named": None,
}


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is installed."""
    backends = [each for each in dispatch._registry["jagged_attention"] if each.name != "flash_attention_4"]
    own = Backend("flash_attention_4", "kernels.attention.flash_attention_4:attention", attention._flash_attention_4)
    monkeypatch.setitem(dispatch._registry, "jagged_attention", (own, *backends))
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(attention, "_why_flash_attention_4_is_missing", lambda: None)


@pytest.mark.usefixtures("declared")
def test_serves_nobody_who_did_not_ask() -> None:
    assert dispatch.selection("jagged_attention", **FACTS)[0] == "hopper"


@pytest.mark.usefixtures("declared")
def test_is_available_by_name_and_says_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    short = FACTS | {"head_dim": 64, "value_dim": 64}
    named = short | {"named": "flash_attention_4"}
    assert dispatch.selection("jagged_attention", **named)[0] == "flash_attention_4"
    for change, reason in (
        ({"biased": True}, "neither block-local attention nor biases"),
        ({"block_local": True}, "neither block-local attention nor biases"),
        ({"head_dim": 264, "value_dim": 264}, "at most 256"),
        ({"value_dim": 32}, "values as wide as keys"),
        ({"same_offsets": False}, "only if q_offsets is k_offsets"),
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"capability": (10, 0)}, "needs sm_90"),
        ({"positive_scale": False}, "positive scale"),
    ):
        assert reason in dispatch.selection("jagged_attention", **named | change)[1]["flash_attention_4"]
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "jagged_attention=flash_attention_4")
    assert dispatch.selection("jagged_attention", **short)[0] == "flash_attention_4"
    monkeypatch.setattr(attention, "_why_flash_attention_4_is_missing", lambda: "cannot be imported: no driver")
    with pytest.raises(dispatch.UnsupportedError, match="cannot be imported: no driver"):
        dispatch.selection("jagged_attention", **short)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend around functions that compute by the reference what theirs document."""
    pytest.importorskip("triton")
    name = "kernels.attention.flash_attention_4"
    if name not in sys.modules:
        interface = ModuleType("flash_attn.cute.interface")
        interface._flash_attn_fwd = interface._flash_attn_bwd = None  # type: ignore[attr-defined]
        for stand_in in (ModuleType("flash_attn"), ModuleType("flash_attn.cute"), interface):
            monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        __import__(name)
    module = sys.modules[name]
    monkeypatch.setattr(module, "_flash_attn_fwd", _fwd)
    monkeypatch.setattr(module, "_flash_attn_bwd", _bwd)
    return module


def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: dict[str, Any]) -> Tensor:
    assert lengths["cu_seqlens_q"].dtype is lengths["cu_seqlens_k"].dtype is torch.int32
    window = (lengths["window_size_left"], lengths["window_size_right"])
    assert not lengths["causal"] or window == (None, 0)
    return jagged_attention(
        *(q, k, v, lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]),
        max_q=lengths["max_seqlen_q"],
        max_k=lengths["max_seqlen_k"],
        scale=lengths["softmax_scale"],
        window=window,
        backend="reference",
    )


def _fwd(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **lengths: Any) -> tuple[Any, ...]:
    assert return_lse
    return _attend(q, k, v, lengths), torch.full((q.shape[1], q.shape[0]), 7.0), None, None, None


def _bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, *, deterministic: bool, **lengths: Any
) -> None:
    assert grad.is_contiguous()
    assert out.shape == grad.shape
    assert (lse == 7.0).all()
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    own = [lengths.pop(name) for name in ("dq", "dk", "dv")]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        gradients = torch.autograd.grad(_attend(*leaves, lengths), leaves, grad)
    for into, gradient in zip(own, gradients, strict=True):
        into.copy_(gradient)


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": (3, 1)}, {"causal": True, "window": 2}], ids=str)
def test_it_is_given_our_masks_and_the_gradients_to_write(masks: dict[str, Any], backend: Any) -> None:
    offsets = offsets_of([3, 0, 9])
    rows = Rows(offsets, 9)
    check_gradients(
        lambda q, k, v: backend.attention(q, k, v, rows, rows, 0.3, checked_mask(**masks)),
        partial(jagged_attention, q_offsets=offsets, k_offsets=offsets, max_q=9, max_k=9, scale=0.3, **masks),
        inputs_of(offsets, offsets, (4, 2), (40, 40), torch.float32),
        outputs(64),
    )


@pytest.mark.parametrize(("width", "ours"), [(16, "triton_forward"), (64, "hopper_forward"), (128, "hopper_forward")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_our_forward_is_in_front_of_their_backward(
    width: int, ours: str, deterministic: bool, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        called.append("forward")
        return torch.zeros_like(q), torch.full((2, 5), 7.0)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, gradients: Any) -> tuple[Tensor, ...]:
        called.append("backward")
        return gradients(q, k, v)

    function = "forward" if ours == "triton_forward" else "attention_forward"
    monkeypatch.setattr(backend, ours, SimpleNamespace(**{function: forward}))
    monkeypatch.setattr(backend.hopper_backward, "attention_backward", backward)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    q, k, v = torch.randn(5, 3, 2, width, requires_grad=True).unbind(1)
    rows = Rows(offsets_of([2, 3]), 3)
    out = backend.attention(q, k, v, rows, rows, 1.0, checked_mask())
    # The gradient of the values is a part of that of their projection.
    assert torch.autograd.grad(out.sum(), v)[0].stride(0) == 3 * 2 * width
    assert called == ["forward", "backward"][: 1 + (deterministic and width >= 64)]


@pytest.mark.usefixtures("declared")
def test_a_compiler_takes_it_without_a_break(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_varlen", lambda **facts: None)  # also on the CPU
    offsets = offsets_of([3, 0, 9])
    q, k, v = (torch.randn(12, 2, 256) for _ in range(3))
    monkeypatch.setattr(backend, "_flash_attn_fwd", lambda q, *_, **__: (q + 1, torch.zeros(2, 12), None, None, None))
    attend = partial(jagged_attention, max_q=1024, max_k=1024, backend="flash_attention_4")
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, offsets, offsets), q + 1)
    assert torch.equal(attend(q, k, v, offsets, offsets), q + 1)

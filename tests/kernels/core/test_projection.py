"""Gradients of the last part of a projection, in whose memory the others follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.attention.gradients import gradients_in_projection
from kernels.core.projection import last_part, whole_of
from kernels.tokens import parts, rotate_qkv


def test_the_whole_is_told_of_once() -> None:
    last = last_part(torch.ones(5, 2, 4), 3)
    whole = whole_of(last, 3)
    assert whole is not None
    assert whole.shape == (5, 3, 2, 4)
    assert whole[:, 2].data_ptr() == last.data_ptr()
    assert whole_of(last, 3) is None


@pytest.mark.parametrize("number", [2, 4])
def test_no_other_tensor_has_a_whole(number: int) -> None:
    last = last_part(torch.ones(5, 2, 4), 3)
    assert whole_of(last, number) is None
    assert whole_of(last[1:], 3) is None
    assert whole_of(last[:, :1], 3) is None
    assert whole_of(torch.ones(5, 3, 2, 4)[:, 2], 3) is None  # what lies beside it may be somebody's
    assert whole_of(torch.ones(5, 2, 4), 3) is None
    assert whole_of(last.detach().requires_grad_(), 3) is None


def test_values_of_a_projection_get_their_gradient_in_one() -> None:
    qkv = torch.randn(6, 3, 2, 4)
    q, k, v = qkv.unbind(1)
    dq, dk, dv = gradients_in_projection(q, k, v)
    assert dq.is_contiguous()
    assert dk.is_contiguous()
    assert whole_of(dv, 3) is not None
    kv = torch.randn(6, 2, 2, 4)
    _, *both = gradients_in_projection(q, *kv.unbind(1))
    assert parts.whole(tuple(both)) is not None
    for strange in (kv[:0].unbind(1), (kv[:, 0], kv[:, 1].clone())):
        assert all(each.is_contiguous() for each in gradients_in_projection(q, *strange))
    for other in (v.clone(), torch.randn(6, 2, 2, 4)[:, 1], qkv[:0, 2]):
        assert whole_of(gradients_in_projection(q, k, other)[2], 3) is None


@pytest.mark.parametrize("number", [2, 3])
def test_a_compiler_that_does_not_know_where_a_part_is_knows_its_gradients_layout(number: int) -> None:
    parts_of_one = torch.randn(6, number, 2, 4).unbind(1)
    elsewhere = [torch.empty_strided(each.shape, each.stride()) for each in parts_of_one]
    for own, other in zip(
        gradients_in_projection(*[*parts_of_one, *parts_of_one][-3:]),
        gradients_in_projection(*[*elsewhere, *elsewhere][-3:]),
        strict=True,
    ):
        assert own.stride() == other.stride()


class Attends(torch.autograd.Function):
    """Stands in for an attention: its gradient of v is the last part of a tensor like the projection, or not."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, beside: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.beside = beside
        return 2 * q + 3 * k + 5 * v

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dv = last_part(grad, 3) if ctx.beside else torch.empty_like(grad)
        return 2 * grad, 3 * grad, dv.copy_(5 * grad), None


@pytest.mark.gpu
@pytest.mark.parametrize("twice", [False, True])  # keys and values for a second attention
@pytest.mark.parametrize("reader", [False, True])  # of the values, besides the attention: autograd adds its gradient
def test_a_rotation_writes_beside_the_gradient_of_values(
    reader: bool, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.tokens.triton import tokens

    copies: list[object] = []
    copy = tokens.copy_heads
    monkeypatch.setattr(tokens, "copy_heads", lambda *tensors: copies.append(1) or copy(*tensors))
    qkv = torch.randn(50, 3, 2, 64, device="cuda", requires_grad=True)
    angle = torch.randn(50, 32, device="cuda")
    weight = torch.randn(50, 2, 64, device="cuda")
    found = []
    for beside in (False, True):
        q, k, v, *again = rotate_qkv(qkv, angle.cos(), angle.sin(), twice=twice, backend="triton")
        loss = (Attends.apply(q, k, v, beside) * weight).sum()
        if twice:
            other = torch.randn(2, 50, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            loss = loss + (again[0] * other.transpose(0, 1) + again[1].square()).sum()  # of other strides
        found.append(torch.autograd.grad(loss + v.square().sum() if reader else loss, qkv)[0])
    assert torch.equal(found[0], found[1])
    assert reader or len(copies) == 1 + twice  # with a second reader's gradient to add, also in place

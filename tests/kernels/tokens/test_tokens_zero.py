"""`zero_unless_`: a tensor as it was, or zeros."""

from __future__ import annotations

import pytest
import torch

from kernels.tokens import zero_unless_


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5), (4097, 2049)], ids=str)  # the last: more than the programs
def test_zeros_unless_a_condition_holds(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    x = torch.full(shape, torch.nan, dtype=dtype, device=device)
    for condition in (torch.ones((), device=device), torch.tensor(-2, device=device)):
        assert bool(zero_unless_(x, condition, backend=backend).isnan().all())
    for condition in (torch.zeros((), device=device), torch.tensor(False, device=device)):
        x.fill_(torch.nan)
        assert zero_unless_(x, condition, backend=backend) is x
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_zeros_in_some_columns_leave_the_others(backend: str) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    whole = torch.full((1001, 12), torch.nan, device=device)
    zero_unless_(whole[:, 4:9], torch.zeros((), device=device), backend=backend)
    assert bool((whole[:, 4:9] == 0).all())
    assert bool(whole[:, :4].isnan().all())
    assert bool(whole[:, 9:].isnan().all())


def test_zeros_need_rows_and_one_condition() -> None:
    x = torch.ones(2, 3)
    for other in (x.t(), torch.ones(3).expand(2, 3)):
        with pytest.raises(ValueError, match=r"x must be contiguous, or \[N, D\] of contiguous rows"):
            zero_unless_(other, torch.zeros(()))
    with pytest.raises(ValueError, match="condition must be one number on cpu"):
        zero_unless_(x, torch.zeros(1))

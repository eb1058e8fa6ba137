"""Gradients of looked-up rows: `concat_finite` brings them together, `zero_unless_` leaves them or zeroes them."""

from __future__ import annotations

import pytest
import torch

from kernels.testing import poisoned_empty
from kernels.tokens import concat_finite, zero_unless_


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


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 8, 129, 1024], ids=str)
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -torch.inf], ids=str)
def test_parts_are_brought_together_and_looked_at(
    bad: float | None, width: int, dtype: torch.dtype, backend: str
) -> None:
    device = "cuda" if backend == "triton" else "cpu"
    wide = torch.randn(300, 2 * width + 3, device=device).to(dtype)
    highest = torch.finfo(dtype).max  # is finite, though its square is not
    parts = [wide[:, :width], wide[:0, :width], wide[1:, width : 2 * width], wide.new_full((1, width), highest)]
    parts += [wide[0, :width].expand(3, width), wide[:width].t()[:5, :1].expand(-1, width)]
    for place in range(len(parts) if bad is not None else 1):
        copies = [part.clone() for part in parts]
        if bad is not None and len(copies[place]):
            copies[place][-1, -1] = bad
            given = [copies[place] if index == place else part for index, part in enumerate(parts)]
        else:
            given = parts
        with poisoned_empty():
            whole, finite = concat_finite(given, backend=backend)
        assert torch.equal(whole.isnan(), torch.cat(given).isnan())
        assert torch.equal(whole.nan_to_num(), torch.cat(given).nan_to_num())
        assert finite.dtype is torch.float32
        assert finite.item() == float(given is parts)


def test_parts_need_one_width_and_dtype() -> None:
    for parts in (
        [],
        [torch.ones(2, 3), torch.ones(2, 4)],
        [torch.ones(2, 3), torch.ones(2, 3).half()],
        [torch.ones(3)],
    ):
        with pytest.raises(ValueError, match="parts must be matrices of one width and one floating dtype"):
            concat_finite(parts)

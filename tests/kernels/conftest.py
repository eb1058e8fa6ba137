from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

# Of use to debuggers and profilers alone; kernels compile an eighth faster without, to the same instructions.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def allow_tf32() -> Iterator[Callable[[bool], None]]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield partial(setattr, torch.backends.cuda.matmul, "allow_tf32")
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _return_memory() -> Iterator[None]:
    """Workers share a GPU: none keeps what its largest test has taken."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 4 * 2**30:
        torch.cuda.empty_cache()

"""One small problem for each jagged operator that has a Triton backend, for the tests that treat all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import jagged

WIDTH, NARROW = 20, 6


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def problems(
    lengths: list[int], device: str = "cpu", offsets_dtype: torch.dtype = torch.int64
) -> dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]]:
    """Name -> (function of (backend, **inputs), inputs in float64)."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)

    total, rows, longest = sum(lengths), len(lengths), max(lengths, default=0)
    total_squared = sum(length * length for length in lengths)
    offsets = offsets_of(lengths, offsets_dtype).to(device)
    reverse = offsets_of(lengths[::-1], offsets_dtype).to(device)
    squares = jagged.squared_offsets(offsets)
    selection = [*range(0, rows, 2), *range(rows - 1, -1, -1)]
    selected_total = sum(lengths[row] for row in selection)
    selected = torch.tensor(selection, dtype=torch.int64, device=device)
    start = torch.arange(rows, device=device) % 3
    size = torch.arange(rows, device=device) * 2 % 5 + 1
    kept = sum(min(i * 2 % 5 + 1, max(length - i % 3, 0)) for i, length in enumerate(lengths))
    limit = max(longest // 2, 1)

    x, y, narrow = random(total, WIDTH), random(total, WIDTH), random(total, NARROW)
    dense, matrices, square = random(rows, WIDTH), random(rows, WIDTH, NARROW), random(total_squared)
    weight, bias, row_bias = random(NARROW, WIDTH), random(NARROW), random(rows, NARROW)
    single, transposed, deep = random(total), random(WIDTH, total).t(), random(total, 3, 4)

    def reducing(function: Callable[..., Tensor], values: Tensor) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return lambda backend, x: function(x, offsets, backend=backend), {"x": values}

    result: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
        "segment_sum": reducing(jagged.segment_sum, x),
        "segment_sum of vectors": reducing(jagged.segment_sum, single),
        "segment_sum of a transposed tensor": reducing(jagged.segment_sum, transposed),
        "segment_mean": reducing(jagged.segment_mean, deep),
        "segment_max": reducing(jagged.segment_max, x),
        "jagged_softmax": reducing(jagged.jagged_softmax, narrow),
        "jagged_softmax of vectors": reducing(jagged.jagged_softmax, single),
        "jagged_flip": reducing(jagged.jagged_flip, deep),
        "jagged_flip of vectors": reducing(jagged.jagged_flip, single),
        "jagged_to_padded": (
            lambda backend, x: jagged.jagged_to_padded(x, offsets, limit, 7.0, backend=backend),
            {"x": deep},
        ),
        "jagged_to_padded keeping the last": (
            lambda backend, x: jagged.jagged_to_padded(x, offsets, limit, 7.0, "last", backend=backend),
            {"x": transposed},
        ),
        "padded_to_jagged": (
            lambda backend, x: jagged.padded_to_jagged(x, offsets, total, backend=backend),
            {"x": random(rows, limit, WIDTH)},
        ),
        "jagged_last": (lambda backend, x: jagged.jagged_last(x, offsets, limit, backend=backend), {"x": x}),
        "jagged_concat": (
            lambda backend, x, y: jagged.jagged_concat(x, offsets, y, reverse, backend=backend)[0],
            {"x": x, "y": y},
        ),
        "jagged_index_select": (
            lambda backend, x: jagged.jagged_index_select(x, offsets, selected, selected_total, backend=backend)[0],
            {"x": x},
        ),
        "jagged_slice": (
            lambda backend, x: jagged.jagged_slice(x, offsets, start, size, kept, backend=backend)[0],
            {"x": x},
        ),
        "jagged_dense_bmm": (
            lambda backend, x, y: jagged.jagged_dense_bmm(x, offsets, y, longest, backend=backend),
            {"x": x, "y": matrices},
        ),
        "jagged_dense_bmm to a wide result": (
            lambda backend, x, y: jagged.jagged_dense_bmm(x, offsets, y, longest, backend=backend),
            {"x": transposed, "y": random(rows, WIDTH, 40)},
        ),
        "jagged_dense_bmm from narrow values": (
            lambda backend, x, y: jagged.jagged_dense_bmm(x, offsets, y, longest, backend=backend),
            {"x": narrow, "y": matrices.mT},
        ),
        "jagged_low_rank": (
            lambda backend, x, left, weight: jagged.jagged_low_rank(x, offsets, left, weight, longest, backend=backend),
            {"x": x, "left": random(rows, NARROW, WIDTH), "weight": weight.mT},
        ),
        "jagged_low_rank to a wide result": (
            lambda backend, x, left, weight: jagged.jagged_low_rank(x, offsets, left, weight, longest, backend=backend),
            {"x": transposed, "left": random(rows, WIDTH, 3).mT, "weight": random(300, 3)},
        ),
        "jagged_low_rank of many columns": (
            lambda backend, x, left, weight: jagged.jagged_low_rank(x, offsets, left, weight, longest, backend=backend),
            {"x": x, "left": random(rows, 18, WIDTH), "weight": random(WIDTH, 18)},
        ),
        "jagged_jagged_bmm": (
            lambda backend, x, y: jagged.jagged_jagged_bmm(x, y, offsets, longest, backend=backend),
            {"x": x, "y": narrow},
        ),
        "jagged_jagged_bmm narrow first": (
            lambda backend, x, y: jagged.jagged_jagged_bmm(x, y, offsets, longest, backend=backend),
            {"x": narrow, "y": transposed},
        ),
        "jagged_jagged_bmm of two wide ones": (
            lambda backend, x, y: jagged.jagged_jagged_bmm(x, y, offsets, longest, backend=backend),
            {"x": x, "y": y},
        ),
        "jagged_jagged_bmm_jagged_out": (
            lambda backend, x, y: jagged.jagged_jagged_bmm_jagged_out(
                x, y, offsets, squares, total_squared, longest, backend=backend
            ),
            {"x": x, "y": y},
        ),
        "array_jagged_bmm_jagged_out": (
            lambda backend, a, y: jagged.array_jagged_bmm_jagged_out(a, y, offsets, squares, longest, backend=backend),
            {"a": square, "y": y},
        ),
        "array_jagged_bmm_jagged_out of the transposes": (
            lambda backend, a, y: jagged.array_jagged_bmm_jagged_out(
                a, y, offsets, squares, longest, True, backend=backend
            ),
            {"a": square, "y": y},
        ),
        "jagged2_softmax": (
            lambda backend, a: jagged.jagged2_softmax(a, offsets, squares, total, backend=backend),
            {"a": square},
        ),
        "jagged_elementwise": (
            lambda backend, x, y: jagged.jagged_elementwise(x, y, "mul", "gelu", backend=backend),
            {"x": deep, "y": deep.flip(0)},
        ),
        "jagged_dense_elementwise add": (
            lambda backend, x, y: jagged.jagged_dense_elementwise(x, offsets, y, "add", "sigmoid", backend=backend),
            {"x": x, "y": dense},
        ),
        "jagged_dense_elementwise mul": (
            lambda backend, x, y: jagged.jagged_dense_elementwise(x, offsets, y, "mul", "silu", backend=backend),
            {"x": x, "y": dense},
        ),
        "jagged_linear without biases": (
            lambda backend, x, weight: jagged.jagged_linear(x, offsets, weight, backend=backend),
            {"x": x, "weight": weight},
        ),
    }
    for activation in ("none", "relu", "gelu", "tanh"):
        result[f"jagged_linear {activation}"] = (
            lambda backend, x, weight, bias, row_bias, activation=activation: jagged.jagged_linear(
                x, offsets, weight, bias, row_bias, activation, backend=backend
            ),
            {"x": x, "weight": weight, "bias": bias, "row_bias": row_bias},
        )
    return result

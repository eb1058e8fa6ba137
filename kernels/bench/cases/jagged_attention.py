"""Benchmark cases of softmax attention: full, causal and windowed, short and long rows, narrow and wide heads.

The peers are `torch` (a backend, PyTorch's FlashAttention 2), FlashAttention 4 where it is installed, and for rows of
up to 2,048 without masks `scaled_dot_product_attention` on padded tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import jagged
from kernels.attention import jagged_attention
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases import cute_peers
from kernels.core.mask import checked_mask
from kernels.core.offsets import attended_pairs


class Shape(NamedTuple):
    """`rows` with lengths up to `maximum` whose mean is `mean` of it, heads of `dim` features, and the masks.

    With a window, query i sees keys i - window to i + window.
    """

    rows: int
    maximum: int
    mean: float
    dim: int
    causal: bool = False
    window: int | None = None

    @property
    def name(self) -> str:
        masks = "_causal" * self.causal + (f"_window{self.window}" if self.window is not None else "")
        return f"B{self.rows}_L{self.maximum}_mean{self.mean}_d{self.dim}{masks}"

    @property
    def masked(self) -> bool:
        return self.causal or self.window is not None


GPU_SHAPES = [
    # Histories of one event type up to all of them merged.
    Shape(1024, 512, 1.0, 128),
    Shape(1024, 512, 0.5, 128),
    Shape(1024, 512, 0.25, 128),
    Shape(512, 1024, 1.0, 128),
    Shape(512, 1024, 0.5, 128),
    Shape(256, 2048, 1.0, 128),
    Shape(256, 2048, 0.5, 128),
    Shape(128, 4096, 0.5, 128),
    Shape(64, 8192, 1.0, 128),
    Shape(64, 8192, 1.0, 128, causal=True),
    Shape(256, 2048, 1.0, 128, causal=True),
    Shape(256, 2048, 0.5, 128, causal=True),
    Shape(128, 4096, 1.0, 128, causal=True),
    Shape(128, 4096, 0.5, 128, causal=True),
    Shape(512, 1024, 0.5, 128, causal=True),
    Shape(256, 2048, 1.0, 128, window=256),
    Shape(256, 2048, 0.5, 128, window=256),
    Shape(128, 4096, 0.5, 128, causal=True, window=256),
    Shape(64, 8192, 1.0, 128, causal=True, window=256),
    # Other heads; the default model's are narrow.
    Shape(512, 1024, 0.5, 16),
    Shape(256, 2048, 0.5, 16, causal=True),
    Shape(1024, 512, 0.5, 32),
    Shape(512, 1024, 0.5, 32),
    Shape(256, 2048, 0.5, 32, causal=True),
    Shape(1024, 512, 0.5, 64),
    Shape(512, 1024, 0.5, 64),
    Shape(256, 2048, 0.5, 64, causal=True),
    Shape(512, 1024, 0.5, 256),
    Shape(256, 2048, 0.5, 256, causal=True),
]
CPU_SHAPES = [
    Shape(4, 32, 1.0, 32),
    Shape(8, 32, 0.5, 32),
    Shape(8, 32, 0.5, 16, causal=True),
    Shape(8, 32, 0.5, 32, window=8),
    Shape(8, 32, 0.5, 32, causal=True, window=8),
]
HEADS = 4
LONGEST_PADDED = 2048
# Pairs of padded query and key whose scores and mask the expected result keeps at a time.
PAIRS_AT_ONCE = 2**28

# bfloat16 results carry about 2^-9 of rounding and so does the softmax that enters them; a wrong mask costs 0.1 and up.
LIMIT = 1e-2


def cases(device: torch.device) -> list[Case]:
    return [
        Case(f"attention_{direction}_{shape.name}", partial(_attention, direction, shape))
        for shape in (GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)
        for direction in ("fwd", "bwd")
    ]


def lengths_of(rows: int, maximum: int, mean: float, device: torch.device) -> Tensor:
    """[rows] lengths: all `maximum` when mean is 1, else uniform in 1..2 * mean * maximum."""
    if mean == 1.0:
        return torch.full((rows,), maximum, device=device)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, int(2 * mean * maximum) + 1, (rows,), generator=generator).to(device)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, mask)


def _expected(inputs: list[Tensor], cotangent: Tensor | None, offsets: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """The output, or with a cotangent the gradients, of the reference in float32, some rows at a time."""
    edges = offsets.tolist()
    at_once = max(PAIRS_AT_ONCE // shape.maximum**2, 1)
    parts = []
    for first in range(0, shape.rows, at_once):
        own = offsets[first : first + at_once + 1]
        tokens = slice(edges[first], edges[first + len(own) - 1])
        exact = [tensor.detach()[tokens].float().requires_grad_(cotangent is not None) for tensor in inputs]
        out = _attend("reference", *exact, own - own[0], shape)
        if cotangent is None:
            parts.append((out,))
        else:
            parts.append(torch.autograd.grad(out, exact, cotangent[tokens].float()))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _attend(backend: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, shape: Shape) -> Tensor:
    lengths = {"max_q": shape.maximum, "max_k": shape.maximum}
    masks = {"causal": shape.causal, "window": shape.window}
    return jagged_attention(q, k, v, offsets, offsets, **lengths, **masks, backend=backend)


def _attention(direction: str, shape: Shape, device: torch.device) -> Problem:
    rows, maximum, mean, dim = shape[:4]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = lengths_of(rows, maximum, mean, device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, cotangent = (
        torch.randn(total, HEADS, dim, device=device, generator=generator).to(dtype) for _ in range(4)
    )
    backward = direction == "bwd"
    inputs = [tensor.requires_grad_(backward) for tensor in (q, k, v)]

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: _attend(backend, q, k, v, offsets, shape), inputs, cotangent, backward)

    def prepare_flash_attention_4() -> Runner:
        """Its offsets are made int32 outside the timing. Its backward adds to dq in any order, ours in a fixed one."""
        function, edges = cute_peers.flash_attention_4(), offsets.int()
        # A window of its own replaces the causal mask, so that the two are one window here.
        window = (None, None) if shape.window is None else (shape.window, 0 if shape.causal else shape.window)

        def attend() -> Tensor:
            return function(
                q, k, v, cu_seqlens_q=edges, cu_seqlens_k=edges, max_seqlen_q=maximum, max_seqlen_k=maximum,
                causal=shape.causal and shape.window is None, window_size=window,
            )[0]  # fmt: skip

        return runner_of(attend, inputs, cotangent, backward)

    def prepare_padded(attend: Callable[..., Tensor] = scaled_dot_product_attention) -> Runner:
        """SDPA on padded tensors: the padding and the mask are made outside the timing."""

        def to_padded(values: Tensor) -> Tensor:
            return jagged.jagged_to_padded(values.detach(), offsets, maximum).transpose(1, 2).contiguous()

        def to_jagged(padded: Tensor) -> Tensor:
            return jagged.padded_to_jagged(padded.transpose(1, 2), offsets, total)

        padded = [to_padded(tensor).requires_grad_(backward) for tensor in (q, k, v)]
        mask = (torch.arange(maximum, device=device) < lengths[:, None])[:, None, None] if mean < 1.0 else None
        if not backward:
            return Runner(lambda: attend(*padded, mask), lambda out: (to_jagged(out),))
        out, padded_cotangent = attend(*padded, mask), to_padded(cotangent)
        return Runner(
            lambda: torch.autograd.grad(out, padded, padded_cotangent, retain_graph=True),
            lambda gradients: tuple(to_jagged(gradient) for gradient in gradients),
        )

    tensors = 8 if backward else 4  # q, k, v, out, and backward their gradients
    contenders = backends_of("jagged_attention", prepare)
    del contenders["padded"]  # it pads inside the timing; here that is done before it
    del contenders["decode"]  # for few queries: see jagged_pooling
    if device.type == "cuda" and (shape.masked or maximum > LONGEST_PADDED):
        del contenders["reference"]  # it keeps a mask of all pairs
    contenders["FlashAttention 4"] = partial(cute_peers.where_it_runs, prepare_flash_attention_4)
    if not shape.masked and maximum <= LONGEST_PADDED:
        contenders["sdpa on padded"] = prepare_padded
        if mean == 1.0 and device.type == "cuda":  # with a mask it is another kernel; `sweep_*` has it on ragged rows
            contenders["cudnn, nothing padded"] = partial(prepare_padded, _cudnn)
    pairs = attended_pairs(offsets, offsets, checked_mask(shape.causal, shape.window))
    return Problem(
        contenders=contenders,
        check=check_relative_error(_expected(inputs, cotangent if backward else None, offsets, shape), LIMIT),
        flops=4 * HEADS * dim * pairs * (2.5 if backward else 1.0),
        bytes=tensors * total * HEADS * dim * dtype.itemsize,
    )

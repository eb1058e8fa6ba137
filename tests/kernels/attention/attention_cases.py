"""What the tests of jagged attention share: an oracle by rows, features as arguments, generated inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.testing import Tolerance

# float64 against float64: only the order of additions differs.
EXACT = Tolerance("same arithmetic in another order", roundings=4, reduction=64, accumulate=torch.float64)

EXACT_GRADIENTS = Tolerance(
    "where one key takes nearly all weight, a gradient is the difference of terms up to 10^4 times its size, "
    "which counts as 10^8 roundings",
    roundings=10**8,
    accumulate=torch.float64,
)


# Of `jagged_attention` and `gdpa`; `targets` asks for numbers of targets, which `with_targets` makes.
STRUCTURES: dict[str, dict[str, Any]] = {
    "targets": {"targets": True, "window": (None, 0)},
    "targets, window": {"targets": True, "window": (3, 1), "target_window": 2},
    "contextual": {"contextual": 2, "window": (None, 0)},
    "prefix": {"prefix": 3, "window": (2, 0)},
    "end": {"align": "end", "window": (None, 0)},
    "all": {"targets": True, "contextual": 1, "prefix": 2, "window": (2, 0), "align": "end"},
    "all, window": {"targets": True, "contextual": 2, "prefix": 5, "window": (1, 2), "target_window": 1},
}


def with_targets(call: dict[str, Any], k_offsets: Tensor) -> dict[str, Any]:
    """The arguments of a case of STRUCTURES: rows without targets, of nothing else, and between."""
    if not call.get("targets"):
        return call
    lengths = k_offsets.diff()
    numbers = lengths * (torch.arange(len(lengths), device=lengths.device) % 4) // 3
    return {key: x for key, x in call.items() if key != "targets"} | {"num_targets": numbers.long()}


def sees(
    i: int,
    j: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    targets: int | None = None,
    contextual: int = 0,
    prefix: int = 0,
    target_window: int | None = None,
    align: str = "start",
) -> tuple[bool, int, int]:
    """Whether query i sees key j of its row, and where both stand for a bias."""
    left, right = window if isinstance(window, tuple) else (window, window)
    history = num_keys - (targets or 0)
    place = i + num_keys - num_queries if align == "end" else i
    if targets is not None and place >= history:
        near = target_window is None or j >= history - target_window or j < max(prefix, contextual)
        return j == place or (j < history and near), history, min(j, history)
    if 0 <= place < min(contextual, history):
        return j < history, place, j
    seen = j < history and (not causal or j <= place)
    seen = seen and (left in (None, -1) or j >= place - left or j < max(prefix, contextual))
    seen = seen and (right in (None, -1) or j <= place + right)
    return seen and (block_size is None or place // block_size == j // block_size), place, j


def outputs(keys: int) -> Tolerance:
    return Tolerance(f"probabilities and result are rounded; sums over {keys} keys", roundings=2, reduction=keys)


def table_gradients(pairs: int) -> Tolerance:
    return Tolerance(
        "an entry of a bias table sums p * dp less p * delta, each up to forty times their difference, and dp as three "
        "tf32 products of truncated halves is short by about a rounding, always to the same side, which counts as 1600 "
        f"roundings; float32 sums over up to {pairs} pairs of a query and a key",
        roundings=1600,
        reduction=pairs,
    )


def gradients(rows: int) -> Tolerance:
    return Tolerance(
        "the gradient of a score is p * (dp - sum p dp): dp and the sum are both rounded at about five times the size "
        "of their difference, and four times each, as three tf32 products and their sum, where a query sees one key "
        f"and the difference is 0: 2 x 4 x 25 roundings; sums over up to {rows} rows",
        roundings=200,
        reduction=rows,
    )


def inputs_of(
    q_offsets: Tensor,
    k_offsets: Tensor,
    heads: tuple[int, int] = (1, 1),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    reach: int | None = None,
    buckets: int | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """q, k, v, and with `reach` or `buckets` the tables and times, as keyword arguments of `jagged_attention`."""
    generator = torch.Generator().manual_seed(seed)
    device = q_offsets.device

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)

    total_q, total_k = int(q_offsets[-1]), int(k_offsets[-1])
    inputs: dict[str, Any] = {
        "q": random(total_q, heads[0], widths[0]).to(dtype),
        "k": random(total_k, heads[1], widths[0]).to(dtype),
        "v": random(total_k, heads[1], widths[1]).to(dtype),
    }
    if reach is not None:
        inputs["position_bias"] = random(heads[0], 2 * reach + 1).to(dtype)
    if buckets is not None:
        inputs["time_bias"] = random(heads[0], buckets).to(dtype)
        for name, total in (("q_times", total_q), ("k_times", total_k)):
            # From seconds to months apart, so that many buckets occur.
            inputs[name] = (random(total) * 3 + 6).exp().long()
    if sinks:
        inputs["sinks"] = random(heads[0]).to(dtype)
    return inputs


def with_lse(attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """`attend` with one more feature in its result: an eighth of the log-sum-exp, which is of their size, or 0."""

    def attended(**inputs: Any) -> Tensor:
        out, lse = attend(**inputs, return_lse=True)
        return torch.cat([out, (lse.nan_to_num(nan=torch.nan, neginf=0) / 8).t()[:, :, None].to(out.dtype)], 2)

    return attended


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_offsets: Tensor,
    k_offsets: Tensor,
    scale: float | None = None,
    num_targets: Tensor | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    width: float = 0.301,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **masks: Any,
) -> Any:
    """One query and one head at a time, over an explicit list of the keys it sees, and a sink after them."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, sums = [], []
    for row in range(len(q_offsets) - 1):
        q_first, k_first = int(q_offsets[row]), int(k_offsets[row])
        counts = int(q_offsets[row + 1]) - q_first, int(k_offsets[row + 1]) - k_first
        own = masks if num_targets is None else masks | {"targets": int(num_targets[row])}
        for i in range(counts[0]):
            met = [sees(i, j, *counts, **own) for j in range(counts[1])]
            seen = [j for j, (shown, *_) in enumerate(met) if shown]
            where = [k_first + j for j in seen]
            heads = []
            for head, query in enumerate(q[q_first + i]):
                shared = head * k.shape[1] // q.shape[1]
                scores = k[where, shared] @ query * scale
                if position_bias is not None:
                    reach = position_bias.shape[1] // 2
                    scores = (
                        scores
                        + position_bias[head, [min(max(met[j][2] - met[j][1], -reach), reach) + reach for j in seen]]
                    )
                if time_bias is not None:
                    assert q_times is not None
                    assert k_times is not None
                    gaps = [abs(int(q_times[q_first + i]) - int(k_times[at])) for at in where]
                    last = time_bias.shape[1] - 1
                    buckets = [min(math.floor(math.log(max(gap, 1)) / width), last) for gap in gaps]
                    scores = scores + time_bias[head, buckets]
                values = v[where, shared]
                if sinks is not None:
                    scores, values = (
                        torch.cat([scores, sinks[head, None]]),
                        torch.cat([values, v.new_zeros(1, v.shape[2])]),
                    )
                heads.append(scores.softmax(0) @ values if len(values) else v.new_zeros(v.shape[2]))
                sums.append(scores.logsumexp(0) if len(values) else v.new_tensor(-torch.inf))
            out.append(torch.stack(heads))
    result = torch.stack(out) if out else v.new_zeros(0, q.shape[1], v.shape[2])
    lse = torch.stack(sums) if out else v.new_zeros(0)
    return (result, lse.view(-1, q.shape[1]).t()) if return_lse else result

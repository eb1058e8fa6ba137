"""Benchmark cases of attention from candidates to the keys of their request.

The shapes are those of the published benchmark of FBGEMM's kernels: 2048 candidates, 64 a user, 64 query rows each, 2
heads of 128; `odd` gives half of the users one more, `seeds32` halves the query rows. `joint` adds the user's own
queries, one a key; `tree` spreads the candidates over 4 vendors a user, each with a quarter as many keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from kernels.attention import jagged_attention
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases import cute_peers, ikbo_peer
from kernels.core import dispatch
from kernels.ikbo.attention import joint_attention, target_attention
from kernels.ikbo.tree import tree_attention

HEADS, HEAD_DIM = 2, 128
USERS, CANDIDATES = {"cuda": 32, "cpu": 2}, {"cuda": 64, "cpu": 3}
LENGTHS = {"cuda": (512, 1024, 2048, 4096), "cpu": (8,)}
KINDS = {"target": (64, False), "target_odd": (64, True), "target_seeds32": (32, False)}

# bfloat16 results carry about 2^-9 of rounding and so do the weights in them; a wrong mask costs 0.1 and up.
LIMIT = 1e-2


def cases(device: torch.device) -> list[Case]:
    lengths = LENGTHS[device.type]
    target = [
        Case(f"{kind}_{direction}_K{length}", partial(_target, *KINDS[kind], direction, length))
        for kind in KINDS
        for length in lengths
        for direction in ("fwd", "bwd")
    ]
    joint = [
        Case(f"joint_{direction}_K{length}", partial(_joint, direction, length))
        for length in lengths
        for direction in ("fwd", "bwd")
    ]
    tree = [
        Case(f"tree_{direction}_K{length}", partial(_tree, direction, length))
        for length in lengths[:2]  # the specification keeps all scores
        for direction in ("fwd", "bwd")
    ]
    return target + joint + tree


def _operands(device: torch.device, backward: bool, *rows: tuple[int, ...]) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(*shape, HEADS, HEAD_DIM, device=device, generator=generator).to(dtype).requires_grad_(backward)
        for shape in rows
    ]


def _wide(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, backward: bool) -> tuple[Tensor, ...]:
    wide = [x.detach().float().requires_grad_(backward) for x in inputs]
    out = attend(*wide)
    return torch.autograd.grad(out, wide, grad.float()) if backward else (out,)


def _target(seeds: int, odd: bool, direction: str, length: int, device: torch.device) -> Problem:
    users, ratio, backward = USERS[device.type], CANDIDATES[device.type], direction == "bwd"
    counts = torch.full((users,), ratio, device=device)
    counts[::2] += int(odd)
    offsets, k_offsets = pad(counts.cumsum(0), (1, 0)), torch.arange(users + 1, device=device) * length
    total = int(offsets[-1])
    inputs = _operands(device, backward, (total, seeds), (users * length,), (users * length,))
    grad = _operands(device, False, (total, seeds))[0]
    maximum = int(counts.max())

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return target_attention(q, k, v, offsets, k_offsets, max_candidates=maximum, max_k=length, backend=backend)

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: attend(*inputs, backend=backend), inputs, grad, backward)

    def per_user(x: Tensor) -> Tensor:
        return x.view(users, -1, HEADS, HEAD_DIM).transpose(1, 2)

    def prepare_folded() -> Runner:
        """All candidates of a user as one long query, which equal numbers of candidates allow."""
        if odd:
            raise dispatch.UnsupportedError("needs equally many candidates a user")

        def folded() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(*(per_user(x) for x in inputs))
            return out.transpose(1, 2).reshape(inputs[0].shape)

        return runner_of(folded, inputs, grad, backward)

    def prepare_broadcast() -> Runner:
        """Keys and values copied for every candidate, as a model that knows no requests does."""
        owner = torch.repeat_interleave(torch.arange(users, device=device), counts)

        def broadcast() -> Tensor:
            q, k, v = inputs
            shared = [x.view(users, length, HEADS, HEAD_DIM).index_select(0, owner).transpose(1, 2) for x in (k, v)]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q.transpose(1, 2), *shared).transpose(1, 2)

        return runner_of(broadcast, inputs, grad, backward)

    def prepare_flash_attention_4() -> Runner:
        """The candidates of a user as one long query, of any number; its offsets are made outside the timing."""
        function = cute_peers.flash_attention_4()
        edges = {"cu_seqlens_q": (offsets * seeds).int(), "cu_seqlens_k": k_offsets.int()}
        longest = {"max_seqlen_q": maximum * seeds, "max_seqlen_k": length}

        def long_queries() -> Tensor:
            q, k, v = inputs
            return function(q.flatten(0, 1), k, v, **edges, **longest)[0].view(q.shape)

        return runner_of(long_queries, inputs, grad, backward)

    def prepare_tlx() -> Runner:
        """Its lists of candidates are made outside the timing."""
        if seeds != 64:
            raise dispatch.UnsupportedError(f"pairs candidates of 64 query rows, got {seeds}")
        peer = ikbo_peer.load_tlx_attention()
        owner = torch.repeat_interleave(torch.arange(users, device=device), counts).int()
        place = torch.arange(total, device=device) - offsets[owner]
        pairs = torch.nonzero(place % 2 == 0).flatten().int()
        q, k, v = inputs
        return Runner(lambda: peer(q.flatten(0, 1), k, v, owner, seeds, length, pairs).view(q.shape))

    contenders = backends_of("jagged_attention", prepare)
    del contenders["padded"]  # it would pad the queries of all candidates of a request
    contenders["FlashAttention 4"] = partial(cute_peers.where_it_runs, prepare_flash_attention_4)
    if not backward:
        contenders["FBGEMM TLX"] = partial(cute_peers.where_it_runs, prepare_tlx)
    if device.type == "cuda":
        contenders |= {"cudnn, candidates folded": prepare_folded, "cudnn, keys broadcast": prepare_broadcast}
    elements = (3 if backward else 2) * total * seeds + (4 if backward else 2) * users * length
    return Problem(
        contenders=contenders,
        check=check_relative_error(_wide(partial(attend, backend="reference"), inputs, grad, backward), LIMIT),
        flops=4.0 * total * seeds * length * HEADS * HEAD_DIM * (2.5 if backward else 1),
        bytes=float(elements * HEADS * HEAD_DIM * inputs[0].element_size()),
    )


def _joint(direction: str, length: int, device: torch.device) -> Problem:
    users, ratio, seeds, backward = USERS[device.type], CANDIDATES[device.type], 64, direction == "bwd"
    k_offsets = torch.arange(users + 1, device=device) * length
    t_offsets = torch.arange(users + 1, device=device) * ratio * seeds
    sizes = (users * length, users * ratio * seeds)
    inputs = _operands(device, backward, (sum(sizes),), (users * length,), (users * length,))
    grad = _operands(device, False, (sum(sizes),))[0]

    def attend(q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        return joint_attention(
            *(q, k, v, [k_offsets, t_offsets], k_offsets),
            max_q=(length, ratio * seeds),
            max_k=length,
            sizes=sizes,
            backend=backend,
        )

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: attend(*inputs, backend=backend), inputs, grad, backward)

    def prepare_two_launches() -> Runner:
        """One call a group. Results stay separate, which saves the copy that would join them."""
        q, k, v = inputs
        own, target = (part.detach().requires_grad_(backward) for part in q.split(sizes))
        grads = grad.split(sizes)

        def two() -> tuple[Tensor, Tensor]:
            keys = {"k_offsets": k_offsets, "max_k": length}
            return (
                jagged_attention(own, k, v, q_offsets=k_offsets, max_q=length, **keys),
                jagged_attention(target, k, v, q_offsets=t_offsets, max_q=ratio * seeds, **keys),
            )

        if not backward:
            return Runner(two, lambda parts: (torch.cat(parts),))
        parts = two()
        return Runner(
            lambda: torch.autograd.grad(parts, [own, target, k, v], grads, retain_graph=True),
            lambda gradients: (torch.cat(gradients[:2]), *gradients[2:]),
        )

    queries = sum(sizes)
    elements = (3 if backward else 2) * queries + (4 if backward else 2) * users * length
    return Problem(
        # The contender that joins them, whatever the default is.
        contenders={"hopper": partial(prepare, "hopper"), "two launches": prepare_two_launches}
        | {"separate": partial(prepare, "reference")},
        check=check_relative_error(_wide(partial(attend, backend="reference"), inputs, grad, backward), LIMIT),
        flops=4.0 * queries * length * HEADS * HEAD_DIM * (2.5 if backward else 1),
        bytes=float(elements * HEADS * HEAD_DIM * inputs[0].element_size()),
    )


def _tree(direction: str, length: int, device: torch.device) -> Problem:
    users, seeds, backward = USERS[device.type], 64, direction == "bwd"
    vendors = 4 if device.type == "cuda" else 2
    ads, lengths = -(-CANDIDATES[device.type] // vendors), (length, length // 4)
    user_to_vendor = torch.arange(users + 1, device=device) * vendors
    vendor_to_ad = torch.arange(users * vendors + 1, device=device) * ads
    owners = users, users * vendors
    k_offsets = [torch.arange(n + 1, device=device) * own for n, own in zip(owners, lengths, strict=True)]
    total = users * vendors * ads
    keys = [(n * own,) for n, own in zip(owners, lengths, strict=True)]
    inputs = _operands(device, backward, (total, seeds), *keys, *keys)
    grad = _operands(device, False, (total, seeds))[0]

    def attend(q: Tensor, *levels: Tensor, backend: str) -> Tensor:
        return tree_attention(
            *(q, levels[:2], levels[2:], (user_to_vendor, vendor_to_ad), k_offsets),
            max_candidates=(vendors * ads, ads),
            max_k=lengths,
            backend=backend,
        )

    def prepare(backend: str) -> Runner:
        return runner_of(lambda: attend(*inputs, backend=backend), inputs, grad, backward)

    queries = total * seeds
    elements = (3 if backward else 2) * queries + (4 if backward else 2) * sum(n for (n,) in keys)
    return Problem(
        contenders=backends_of("tree_attention", prepare),
        check=check_relative_error(_wide(partial(attend, backend="reference"), inputs, grad, backward), LIMIT),
        flops=4.0 * queries * sum(lengths) * HEADS * HEAD_DIM * (2.5 if backward else 1),
        bytes=float(elements * HEADS * HEAD_DIM * inputs[0].element_size()),
    )

"""The GDPA modules against their equations, a row at a time in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from modules.costs.flops import FlopCounter
from modules.layers.attention.gdpa import GDPABlock, GDPAPooling, GDPASelfAttention, PersonalizedFFN

DIM, HEADS = 8, 2
OFFSETS = torch.tensor([0, 3, 3, 4, 8])
MAX_LENGTH = 5


@pytest.fixture
def values() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(8, DIM, dtype=torch.float64)


@pytest.fixture
def summary() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, DIM, dtype=torch.float64)


def heads(x: Tensor) -> Tensor:
    """[n, DIM] -> [HEADS, n, DIM / HEADS]."""
    return x.unflatten(1, (HEADS, -1)).transpose(0, 1)


def attention(q: Tensor, k: Tensor, v: Tensor, tau: float, norm: bool = False) -> Tensor:
    """The equation for one row; q, k, v [n, DIM]."""
    q, k, v = heads(q), heads(k), heads(v)
    before, after = 1 / tau, 1.0
    if norm:
        q, k = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() for x in (q, k))
        before, after = (DIM // HEADS) ** -0.5, 1 / tau
    return after * (F.gelu(before * (q @ k.mT)) @ v).transpose(0, 1).flatten(1)


def rows(values: Tensor) -> list[Tensor]:
    return list(values.split(OFFSETS.diff().tolist()))


def self_attention_row(module: GDPASelfAttention, x: Tensor) -> Tensor:
    q, k, v = (x @ module.query_key_value.weight.T).chunk(3, 1)
    return attention(q, k, v, MAX_LENGTH, module.qk_norm) @ module.output.weight.T


def pooling_row(module: GDPAPooling, seeds: Tensor, x: Tensor) -> Tensor:
    k, v = (x @ module.key_value.weight.T).chunk(2, 1)
    return attention(seeds @ module.query.weight.T, k, v, MAX_LENGTH, module.qk_norm) @ module.output.weight.T


def pffn_row(module: PersonalizedFFN, x: Tensor, summary: Tensor) -> Tensor:
    return attention(x, module.mix[0::2] @ summary, module.mix[1::2] @ summary, len(module.mix) / 2, module.qk_norm)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention(values: Tensor, qk_norm: bool) -> None:
    module = GDPASelfAttention(DIM, HEADS, max_length=MAX_LENGTH, qk_norm=qk_norm).double()
    expected = torch.cat([self_attention_row(module, x) for x in rows(values)])
    torch.testing.assert_close(module(values, OFFSETS), expected)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_pooling(values: Tensor, qk_norm: bool) -> None:
    module = GDPAPooling(DIM, HEADS, 3, max_length=MAX_LENGTH, qk_norm=qk_norm).double()
    expected = torch.stack([pooling_row(module, module.seeds, x) for x in rows(values)])
    out = module(values, OFFSETS)
    torch.testing.assert_close(out, expected)
    assert (out[1] == 0).all(), "the summary of an empty row"


@pytest.mark.parametrize("qk_norm", [False, True])
def test_pffn(values: Tensor, summary: Tensor, qk_norm: bool) -> None:
    module = PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=MAX_LENGTH, qk_norm=qk_norm).double()
    expected = torch.cat([pffn_row(module, x, s) for x, s in zip(rows(values), summary, strict=True)])
    torch.testing.assert_close(module(values, OFFSETS, summary), expected)


def test_a_scale_that_is_given_replaces_that_of_the_constants(values: Tensor, summary: Tensor) -> None:
    own = GDPASelfAttention(DIM, HEADS, max_length=9, score_scale=1 / MAX_LENGTH).double()
    torch.testing.assert_close(own(values, OFFSETS), torch.cat([self_attention_row(own, x) for x in rows(values)]))
    pool = GDPAPooling(DIM, HEADS, 3, max_length=9, score_scale=1 / MAX_LENGTH).double()
    expected = torch.stack([pooling_row(pool, pool.seeds, x) for x in rows(values)])
    torch.testing.assert_close(pool(values, OFFSETS), expected)
    ffn = PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=9, score_scale=0.5).double()
    keys, weights = ffn.mix[0::2] @ summary, ffn.mix[1::2] @ summary
    parts = [attention(x, k, v, tau=2) for x, k, v in zip(rows(values), keys, weights, strict=True)]
    torch.testing.assert_close(ffn(values, OFFSETS, summary), torch.cat(parts))


def test_the_output_scale_multiplies_the_sum(values: Tensor, summary: Tensor) -> None:
    torch.manual_seed(0)
    one, third = (
        [
            GDPASelfAttention(DIM, HEADS, max_length=MAX_LENGTH, out_scale=scale),
            GDPAPooling(DIM, HEADS, 3, max_length=MAX_LENGTH, out_scale=scale),
            PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=MAX_LENGTH, out_scale=scale),
        ]
        for scale in (1.0, 1 / 3)
    )
    for plain, scaled in zip(one, third, strict=True):
        scaled.load_state_dict(plain.state_dict())
        inputs = (values, OFFSETS, summary)[: 3 if isinstance(plain, PersonalizedFFN) else 2]
        torch.testing.assert_close(scaled.double()(*inputs), plain.double()(*inputs) / 3)


def test_pffn_reads_its_weights_without_a_copy(
    values: Tensor, summary: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *rest: object, **named: object) -> Tensor:
        seen.extend((k, v))
        return torch.zeros_like(q)

    monkeypatch.setattr("modules.layers.attention.gdpa.gdpa", spy)
    PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=MAX_LENGTH).double()(values, OFFSETS, summary)
    assert all(x.flatten(0, 1).data_ptr() == x.data_ptr() for x in seen)


def test_an_empty_batch() -> None:
    nothing, offsets = torch.zeros(0, DIM), torch.zeros(1, dtype=torch.int64)
    ffn = PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=MAX_LENGTH)
    assert ffn(nothing, offsets, torch.zeros(0, 3, DIM)).shape == (0, DIM)
    for module in (
        GDPASelfAttention(DIM, HEADS, max_length=MAX_LENGTH),
        GDPAPooling(DIM, HEADS, 2, max_length=MAX_LENGTH),
    ):
        assert module(nothing, offsets).numel() == 0


def block_row(q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    centred = q - q.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    inner = attend(normed) + normed
    return q + inner / (inner.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def test_block_around_each(values: Tensor, summary: Tensor) -> None:
    own = GDPASelfAttention(DIM, HEADS, max_length=MAX_LENGTH).double()
    expected = [block_row(x, lambda q: self_attention_row(own, q)) for x in rows(values)]
    torch.testing.assert_close(GDPABlock(own)(values, OFFSETS), torch.cat(expected))

    ffn = PersonalizedFFN(DIM, HEADS, 3, hidden=6, max_length=MAX_LENGTH).double()
    pairs = zip(rows(values), summary, strict=True)
    expected = [block_row(x, lambda q, s=s: pffn_row(ffn, q, s)) for x, s in pairs]
    torch.testing.assert_close(GDPABlock(ffn)(values, OFFSETS, summary), torch.cat(expected))

    pool = GDPAPooling(DIM, HEADS, 3, max_length=MAX_LENGTH).double()
    expected = [block_row(pool.seeds, lambda q, x=x: pooling_row(pool, q, x)) for x in rows(values)]
    torch.testing.assert_close(GDPABlock(pool)(values, OFFSETS), torch.stack(expected))


def test_what_is_wrapped_around_a_block_s_attention_runs(values: Tensor, summary: Tensor) -> None:
    for module, inputs in ((modules()[0][0], (values, OFFSETS)), (modules()[2][0], (values, OFFSETS, summary))):
        block = GDPABlock(module.double())
        expected, called = block(*inputs), []
        module.register_forward_hook(lambda *_, c=called: c.append(True))
        block.attention = checkpoint_wrapper(module)
        torch.testing.assert_close(block(*inputs), expected)
        assert called == [True]


def modules() -> list[tuple[nn.Module, int]]:
    """Each module with its number of inputs."""
    activations = ["gelu_poly", "silu"]
    return [
        (GDPASelfAttention(DIM, HEADS, max_length=MAX_LENGTH, activation=activations, window=2, qk_norm=True), 2),
        (GDPAPooling(DIM, HEADS, 3, max_length=MAX_LENGTH, activation=activations, qk_norm=True), 2),
        (PersonalizedFFN(DIM, HEADS, 3, 6, max_length=MAX_LENGTH, activation=activations, qk_norm=True), 3),
    ]


@pytest.mark.parametrize("which", range(3))
def test_every_parameter_learns_and_rows_are_independent(values: Tensor, summary: Tensor, which: int) -> None:
    module, num_inputs = modules()[which]
    module = GDPABlock(module).double()
    inputs = (values, OFFSETS, summary)[:num_inputs]
    out = module(*inputs)
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name
    # The last row alone gives what it gave among others: no scale depends on the batch.
    alone = (values[4:], torch.tensor([0, 4]), summary[3:])[:num_inputs]
    torch.testing.assert_close(module(*alone), out[-1:] if which == 1 else out[4:])


@pytest.mark.parametrize("which", range(3))
def test_empty_batch_and_autocast(which: int) -> None:
    module, num_inputs = modules()[which]
    nothing = (torch.zeros(0, DIM), torch.tensor([0, 0]), torch.zeros(1, 3, DIM))[:num_inputs]
    out = GDPABlock(module)(*nothing)
    assert out.shape == ((1, 3, DIM) if which == 1 else (0, DIM))
    assert out.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        half = module(torch.randn(8, DIM), OFFSETS, *(torch.randn(4, 3, DIM),) * (num_inputs - 2))
    assert half.dtype is torch.bfloat16
    assert half.isfinite().all()


def test_flops(values: Tensor, summary: Tensor) -> None:
    own, pool, ffn = (module.double() for module, _ in modules())
    counts = []
    for module, inputs in ((own, ()), (pool, ()), (ffn, (summary,))):
        with FlopCounter() as counter:
            module(values, OFFSETS, *inputs)
        counts.append(counter.total)
    pairs = 3 * 3 + 1 + (4 * 4 - 2)  # its window hides the two ends of the longest row from each other
    assert counts == [
        8 * 2 * (3 * DIM * DIM + DIM * DIM) + 4 * DIM * pairs,
        2 * DIM * DIM * (3 + 4 * 3 + 2 * 8) + 4 * DIM * 3 * 8,
        4 * 3 * 2 * 6 * 2 * DIM + 8 * 4 * DIM * 6,
    ]

"""The MoE layer against a per-token loop in float64, and its balancing."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from modules.layers.moe import Dispatcher, MoE, Routing, load_balancing_loss, update_router_biases

DIM, EXPERT_DIM = 6, 5


def make_moe(num_experts: int, top_k: int, **options) -> MoE:
    torch.manual_seed(0)
    moe = MoE(DIM, EXPERT_DIM, num_experts, top_k, **options).double()
    moe.router.expert_bias.copy_(torch.randn(num_experts) * 0.3)
    return moe


def dense_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    a = w_gate @ x
    return w_down @ (a / (1 + torch.exp(-a)) * (w_up @ x))


def oracle(moe: MoE, x: Tensor, score: str, normalize: bool, shared: int) -> Tensor:
    """One token and one expert at a time; only the parameters are shared with the layer."""
    weights = dict(moe.named_parameters())
    width, outputs = EXPERT_DIM, []
    for token in x:
        logits = weights["router.gate.weight"] @ token
        scores = logits.exp() / logits.exp().sum() if score == "softmax" else 1 / (1 + torch.exp(-logits))
        ranked = sorted(range(len(scores)), key=lambda e: -(scores[e] + moe.router.expert_bias[e]).item())
        chosen = ranked[: moe.router.top_k]
        total = sum(scores[e] for e in chosen) if normalize else 1.0
        y = torch.zeros(DIM, dtype=torch.float64)
        for e in chosen:
            gate_up = weights["experts.w_gate_up"][e]
            y = y + scores[e] / total * dense_swiglu(
                token, gate_up[:width], gate_up[width:], weights["experts.w_down"][e]
            )
        if shared:
            gate_up = weights["shared.gate_up.weight"]
            y = y + dense_swiglu(
                token, gate_up[: shared * width], gate_up[shared * width :], weights["shared.down.weight"]
            )
        outputs.append(y)
    return torch.stack(outputs) if outputs else x[:, :0].sum() + torch.zeros(0, DIM, dtype=torch.float64)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "shared"), [(17, 4, 2, 0), (1, 3, 2, 1), (9, 3, 3, 2), (3, 8, 2, 0)]
)
def test_forward_and_every_gradient_equal_the_per_token_loop(score, normalize, num_tokens, num_experts, top_k, shared):
    moe = make_moe(num_experts, top_k, score=score, normalize_weights=normalize, num_shared_experts=shared)
    # A transposed view: the layer must not rely on contiguous tokens.
    x = torch.randn(DIM, num_tokens, dtype=torch.float64).t().requires_grad_()
    upstream = torch.randn(num_tokens, DIM, dtype=torch.float64)
    inputs = [x, *moe.parameters()]

    actual = moe(x)
    expected = oracle(moe, x, score, normalize, shared)
    # float64: only the order of sums differs.
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    for actual_grad, expected_grad in zip(torch.autograd.grad(actual, inputs, upstream), expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-10, atol=1e-12)


def test_one_expert_is_a_dense_swiglu():
    moe = make_moe(1, 1)
    x = torch.randn(7, DIM, dtype=torch.float64)
    w_gate, w_up = moe.experts.w_gate_up[0].chunk(2)
    expected = torch.stack([dense_swiglu(token, w_gate, w_up, moe.experts.w_down[0]) for token in x])
    torch.testing.assert_close(moe(x), expected, rtol=1e-10, atol=1e-12)


def test_no_tokens_give_an_empty_output_and_zero_gradients():
    moe = make_moe(3, 2, num_shared_experts=1, aux_loss_weight=0.1)
    x = torch.empty(0, DIM, dtype=torch.float64, requires_grad=True)
    y = moe(x)
    (y.sum() + moe.aux_loss).backward()
    assert y.shape == (0, DIM)
    assert x.grad.shape == (0, DIM)
    assert moe.aux_loss == 0
    # Zero, not None: ranks without tokens still join the gradient reduction.
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in moe.parameters())
    assert moe.router.tokens_per_expert.tolist() == [0, 0, 0]


def test_all_tokens_to_one_expert_leaves_the_others_without_gradient():
    moe = make_moe(4, 1, normalize_weights=False)
    moe.router.expert_bias.copy_(torch.tensor([0.0, 0.0, 10.0, 0.0]))
    x = torch.randn(11, DIM, dtype=torch.float64)
    y = moe(x)
    torch.testing.assert_close(y, oracle(moe, x, "softmax", False, 0), rtol=1e-10, atol=1e-12)
    y.square().sum().backward()
    for weight in (moe.experts.w_gate_up, moe.experts.w_down):
        assert [bool(grad.any()) for grad in weight.grad] == [False, False, True, False]
    assert moe.router.tokens_per_expert.tolist() == [0, 0, 11, 0]


def test_selection_bias_never_enters_the_output():
    """With k = E every expert is selected whatever the bias, so a bias in the weights would show."""
    moe = make_moe(3, 3, score="sigmoid", normalize_weights=False)
    x = torch.randn(5, DIM, dtype=torch.float64)
    before = moe(x)
    moe.router.expert_bias.add_(torch.tensor([5.0, -5.0, 1.0]))
    torch.testing.assert_close(moe(x), before, rtol=1e-12, atol=1e-12)


class LoopDispatcher:
    """Another dispatcher: rows by expert and then token, found with Python lists."""

    def dispatch(self, x: Tensor, routing: Routing):
        pairs = [(e, n, j) for n, chosen in enumerate(routing.selected_experts.tolist()) for j, e in enumerate(chosen)]
        pairs.sort()
        ends = [sum(e <= expert for e, _, _ in pairs) for expert in range(len(routing.counts))]
        return x[[n for _, n, _ in pairs]], torch.tensor(ends, dtype=torch.int32), pairs

    def combine(self, rows: Tensor, routing: Routing, pairs) -> Tensor:
        y = torch.zeros(len(routing.weights), rows.shape[1], dtype=rows.dtype)
        for row, (_, n, j) in zip(rows, pairs, strict=True):
            y[n] += routing.weights[n, j] * row
        return y


def test_dispatcher_is_replaceable_and_both_agree():
    moe, x = make_moe(5, 3), torch.randn(13, DIM, dtype=torch.float64)
    routing = moe.router(x)
    rows, ends, _ = Dispatcher().dispatch(x, routing)
    expected_rows, expected_ends, _ = LoopDispatcher().dispatch(x, routing)
    assert torch.equal(rows, expected_rows)
    assert torch.equal(ends, expected_ends)
    assert ends.dtype == torch.int32

    y = moe(x)
    moe.dispatcher = LoopDispatcher()
    torch.testing.assert_close(moe(x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dispatcher", [Dispatcher, LoopDispatcher])
def test_hooks_of_the_experts_run(dispatcher):
    """On which fully_shard relies."""
    moe, x = make_moe(4, 2), torch.randn(5, DIM, dtype=torch.float64)
    moe.dispatcher = dispatcher()
    y, seen = moe(x), []
    moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    moe.experts.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(moe(x), 2 * y)
    assert seen == [x]


def test_two_runs_are_bitwise_equal():
    def run():
        torch.manual_seed(0)
        moe = MoE(32, 16, 8, 2, num_shared_experts=1, aux_loss_weight=0.1)
        x = torch.randn(200, 32, requires_grad=True)
        y = moe(x)
        (y.square().mean() + moe.aux_loss).backward()
        return [y, x.grad, *(parameter.grad for parameter in moe.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_router_is_fp32_and_experts_bf16_under_autocast():
    torch.manual_seed(0)
    moe = MoE(32, 16, 8, 2)
    x = torch.randn(64, 32)
    reference, reference_routing = moe(x), moe.router(x)
    with torch.autocast("cpu", torch.bfloat16):
        routing, y = moe.router(x), moe(x)
    assert all(torch.equal(a, b) for a, b in zip(routing, reference_routing, strict=True))
    assert routing.weights.dtype == torch.float32
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in moe.parameters())
    # Operands, both GEMM results and the output are rounded to bf16 (at most 2^-9 relative, rms 2^-9/sqrt(3) each): six
    # roundings in quadrature and a factor 2 for what SwiGLU amplifies.
    error = (y.float() - reference).norm() / reference.norm()
    assert 0 < error < 2 * math.sqrt(6) * 2**-9 / math.sqrt(3)


def test_bf16_tokens_are_scored_in_fp32():
    torch.manual_seed(0)
    router = MoE(32, 16, 8, 2).router
    x = torch.randn(64, 32).bfloat16()
    assert torch.equal(router(x).scores, router(x.float()).scores)


def test_experts_start_like_linear_layers():
    torch.manual_seed(0)
    experts = MoE(48, 96, 64, 2).experts
    for weight, fan_in in ((experts.w_gate_up, 48), (experts.w_down, 96)):
        assert weight.abs().max() <= fan_in**-0.5
        # 64 * 48 * 96 uniform draws: their standard deviation is known to a part in a thousand.
        assert weight.std().item() == pytest.approx(fan_in**-0.5 / math.sqrt(3), rel=5e-3)


# Balancing


def test_aux_loss_and_its_gradient_by_hand():
    moe = make_moe(4, 2, score="sigmoid", aux_loss_weight=0.3)
    x = torch.randn(10, DIM, dtype=torch.float64)
    moe(x)
    counts = torch.bincount(moe.router(x).selected_experts.flatten(), minlength=4)
    scores = torch.sigmoid(x @ moe.router.gate.weight.t())
    mean_share = (scores / scores.sum(1, keepdim=True)).mean(0)
    expected = 0.3 * 4 * (counts.double() / 20 * mean_share).sum()
    torch.testing.assert_close(moe.aux_loss, expected, rtol=1e-12, atol=0)
    (gate_grad,) = torch.autograd.grad(moe.aux_loss, moe.router.gate.weight)
    torch.testing.assert_close(
        gate_grad, torch.autograd.grad(expected, moe.router.gate.weight)[0], rtol=1e-10, atol=1e-14
    )
    assert gate_grad.any()


def test_aux_loss_is_one_at_balance_and_num_experts_at_collapse():
    uniform, balanced = torch.full((6, 3), 1 / 3), torch.tensor([4, 4, 4])
    assert load_balancing_loss(uniform, balanced).item() == pytest.approx(1)
    assert load_balancing_loss(torch.eye(3)[[0] * 6], torch.tensor([6, 0, 0])).item() == pytest.approx(3)


def test_aux_loss_is_off_by_default():
    moe = make_moe(4, 2)
    moe(torch.randn(10, DIM, dtype=torch.float64))
    assert moe.aux_loss == 0
    assert not moe.aux_loss.requires_grad


def test_bias_step_by_hand():
    router = make_moe(4, 2, bias_update_rate=0.1).router
    router.expert_bias.zero_()
    router.update_bias(torch.tensor([10, 2, 4, 0]))  # mean 4: delta = -.1, +.1, 0, +.1 with mean .025
    expected = torch.tensor([-0.125, 0.075, -0.025, 0.075], dtype=torch.float64)
    torch.testing.assert_close(router.expert_bias, expected, rtol=1e-12, atol=1e-15)


def test_counts_accumulate_in_training_only_and_reset_at_the_update():
    model = nn.ModuleDict({"first": make_moe(4, 2), "second": make_moe(3, 1, normalize_weights=False)})
    x = torch.randn(10, DIM, dtype=torch.float64)
    for moe in model.values():
        moe(x), moe(x)
        moe.eval()(x)
    calls = []

    def all_reduce(counts: Tensor) -> Tensor:
        calls.append(counts.clone())
        return counts

    violation = update_router_biases(model, all_reduce)
    assert [counts.dtype for counts in calls] == [torch.int64]
    first, second = calls[0].split([4, 3])
    assert first.sum() == 40
    assert second.sum() == 20
    assert violation["first.router"].item() == pytest.approx(first.max().item() / 10 - 1)
    assert violation["second.router"].item() == pytest.approx(second.max().item() / (20 / 3) - 1)
    assert not any(moe.router.tokens_per_expert.any() for moe in model.values())

    biases = [moe.router.expert_bias.clone() for moe in model.values()]
    assert [value.item() for value in update_router_biases(model).values()] == [0, 0]  # nothing was counted since
    assert all(torch.equal(moe.router.expert_bias, bias) for moe, bias in zip(model.values(), biases, strict=True))


def test_two_ranks_step_as_one_rank_with_all_tokens():
    ranks, whole = [make_moe(5, 2) for _ in range(2)], make_moe(5, 2)
    # Opposite tokens, so that each rank alone would step its bias another way.
    x = torch.randn(DIM, dtype=torch.float64) * torch.tensor([[3.0]] * 4 + [[-3.0]] * 7, dtype=torch.float64)
    ranks[0](x[:4]), ranks[1](x[4:]), whole(x)
    total = sum(rank.router.tokens_per_expert for rank in ranks)
    for rank in ranks:
        update_router_biases(rank, lambda counts: total)
    update_router_biases(whole)
    assert all(torch.equal(rank.router.expert_bias, whole.router.expert_bias) for rank in ranks)


def test_model_without_moe_reduces_nothing():
    assert update_router_biases(nn.Linear(2, 2), lambda counts: pytest.fail("no router to reduce for")) == {}


def test_bias_updates_move_the_load_toward_balance():
    torch.manual_seed(0)
    moe = MoE(16, 4, 8, 2, score="sigmoid", bias_update_rate=0.01)
    # Tokens share a strong common direction, so an unbiased router sends nearly all of them to the same experts.
    common = torch.randn(16) * 2
    violations = []
    with torch.no_grad():
        for _ in range(150):
            moe.router(common + torch.randn(256, 16))
            violations.append(update_router_biases(moe)["router"].item())
    assert violations[0] > 1.5
    # At balance 64 tokens go to each expert, with a sampling error near 8; the largest of eight is within 3 of those.
    assert sum(violations[-20:]) / 20 < 3 * 8 / 64
    assert moe.router.expert_bias.mean().abs() < 1e-6


def test_rate_zero_leaves_the_bias():
    moe = make_moe(4, 2, bias_update_rate=0.0)
    before = moe.router.expert_bias.clone()
    moe(torch.randn(9, DIM, dtype=torch.float64))
    assert update_router_biases(moe)["router"] > 0
    assert torch.equal(moe.router.expert_bias, before)


def test_tokens_may_have_more_dimensions():
    moe = make_moe(4, 2, num_shared_experts=1)
    for shape in ((2, 3, 5), (3, 0), (1, 4)):
        x = torch.randn(*shape, DIM, dtype=torch.float64)
        y = moe(x)
        assert y.shape == x.shape
        assert torch.equal(y.flatten(0, -2), moe(x.flatten(0, -2)))


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_a_layer_that_has_run_can_be_copied_and_pickled(weight):
    moe = make_moe(4, 2, aux_loss_weight=weight)
    x = torch.randn(9, DIM, dtype=torch.float64)
    y = moe(x)
    for other in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert torch.equal(other.aux_loss, moe.aux_loss)
        assert torch.equal(other(x), y)
    (y.sum() + moe.aux_loss).backward()
    assert moe.router.gate.weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_layer_is_balanced_in_fp32(dtype):
    moe = make_moe(4, 2, bias_update_rate=1e-3).float()
    before = moe.router.expert_bias + 1  # where a step is less than a bfloat16 can tell
    moe.router.expert_bias += 1
    moe.to(dtype)
    assert {parameter.dtype for parameter in moe.parameters()} == {dtype}
    moe(torch.randn(9, DIM, dtype=dtype))
    moe.router.update_bias(torch.tensor([9, 5, 4, 0]))
    step = torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3])
    torch.testing.assert_close(moe.router.expert_bias, before + step, rtol=0, atol=2e-7)


def test_made_without_memory_a_router_has_its_buffers():
    with torch.device("meta"):
        assigned, moved = MoE(DIM, EXPERT_DIM, 4, 2), MoE(DIM, EXPERT_DIM, 4, 2)
    whole = MoE(DIM, EXPERT_DIM, 4, 2)
    assigned.load_state_dict(whole.state_dict(), assign=True)
    moved.to_empty(device="cpu")
    for buffer in moved.buffers():
        buffer.fill_(7)
    moved.router.reset_parameters()
    moved.load_state_dict(whole.state_dict())
    x = torch.randn(9, DIM)
    for moe in (whole, assigned, moved):
        moe(x)
        assert moe.router.tokens_per_expert.sum() == 18
        assert torch.equal(moe.router.expert_bias, torch.zeros(4))


def test_checkpoints_hold_the_bias_and_not_the_counts():
    moe = make_moe(4, 2, num_shared_experts=1)
    moe(torch.randn(9, DIM, dtype=torch.float64))
    state = moe.state_dict()
    assert sorted(state) == [
        "experts.w_down",
        "experts.w_gate_up",
        "router.expert_bias",
        "router.gate.weight",
        "shared.down.weight",
        "shared.gate_up.weight",
    ]
    assert "router.expert_bias" not in dict(moe.named_parameters())
    other = MoE(DIM, EXPERT_DIM, 4, 2, num_shared_experts=1).double()
    other.load_state_dict(state)
    assert torch.equal(other.router.expert_bias, moe.router.expert_bias)


def test_a_layer_compiles_into_one_graph_that_serves_other_numbers_of_tokens():
    """On a CPU, where the products read how many rows each expert has."""
    torch.compiler.reset()
    moe = MoE(DIM, EXPERT_DIM, 2, 1, normalize_weights=False, aux_loss_weight=0.1)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (9, 5):
        x = torch.randn(tokens, DIM)
        results = []
        for layer in (compiled, moe):
            given = x.clone().requires_grad_()
            y = layer(given)
            (y.square().sum() + moe.aux_loss).backward()
            results.append((y, given.grad, *(p.grad for p in moe.parameters())))
            moe.zero_grad()
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, r"top_k must be in 1\.\.num_experts=4, got 5"),
        ({"num_experts": 4, "top_k": 0}, "got 0"),
        ({"num_experts": 4, "top_k": 2, "score": "relu"}, r"\['sigmoid', 'softmax'\], got 'relu'"),
        ({"num_experts": 4, "top_k": 1}, "normalize_weights=false or moe.top_k=2"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MoE(DIM, EXPERT_DIM, **options)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_kinds_of_tokens_choose_among_experts_of_their_own(score: str) -> None:
    torch.manual_seed(0)
    layer, x = MoE(8, 4, 6, 2, score=score, num_kinds=2), torch.randn(5, 2, 8)
    layer.router.expert_bias.copy_(torch.tensor([0.0, 0, 0, 9, 9, 9]))  # however much others are preferred
    alone = [MoE(8, 4, 3, 2, score=score) for _ in range(2)]
    for kind, each in enumerate(alone):
        own = slice(3 * kind, 3 * kind + 3)
        for mine, whole in zip(each.parameters(), layer.parameters(), strict=True):
            mine.data.copy_(whole.data[own])
    torch.testing.assert_close(layer(x), torch.stack([each(x[:, kind]) for kind, each in enumerate(alone)], 1))
    assert layer(torch.randn(0, 2, 8)).shape == (0, 2, 8)
    with pytest.raises(ValueError, match="7 experts cannot be shared out evenly among 2 kinds"):
        MoE(8, 4, 7, 2, num_kinds=2)
    with pytest.raises(ValueError, match=r"moe.top_k must be in 1..num_experts=3, got 4"):
        MoE(8, 4, 6, 4, num_kinds=2)

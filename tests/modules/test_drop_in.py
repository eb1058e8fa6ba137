"""What a training script does to a module that it takes into a model of its own, done to each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.broadcast import CandidateRows
from modules.layers.attention.cross_layer import CrossLayerAttention
from modules.layers.attention.gdpa import GDPABlock, GDPAPooling, GDPASelfAttention, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import rotation
from modules.layers.attention.target_attention import SelfAndTargetAttention, TargetAttention
from modules.layers.attention.token_attention import TokenAttention
from modules.layers.feed_forward.token_linear import TokenFeedForward, TokenLinear
from modules.layers.interaction.dot_cross import DHENLayer
from modules.layers.interaction.lce import LCE
from modules.layers.interaction.sum_kron import SumKronLinear
from modules.layers.interaction.wukong import WukongExperts, WukongLayer
from modules.layers.moe import MoE
from modules.layers.pooling.pma import PMA
from modules.layers.pooling.seed_pooling import SeedPooling
from modules.layers.sequence.pyramid import PyramidLevel
from modules.precision import apply_recipe

DIM, HEADS = 32, 4
OFFSETS, CANDIDATES = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 2, 5, 5])
LIMITS = {"max_candidates": 3, "max_length": 5}


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = JaggedSelfAttention(DIM, HEADS, max_length=5)

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.attention(values, offsets, rotation(torch.arange(len(values)), DIM // HEADS))


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_context": 2, "hidden": 8, "num_tokens": 2, "max_length": 5, "dropout": 0.0}
        self.level = PyramidLevel(DIM, HEADS, window=None, **options)

    def forward(self, values: Tensor, offsets: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        return self.level(values, offsets, rotation(torch.arange(len(values)), DIM // HEADS), context)


class OverRequests(nn.Module):
    """A layer over candidates and requests, which makes its rows of offsets."""

    def __init__(self, make: Callable[[], nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer, self.options = make(), options

    def forward(self, candidate: Tensor, request: Tensor, offsets: Tensor) -> Tensor:
        return self.layer(candidate, request, CandidateRows.of_offsets(offsets, len(candidate)), **self.options)


class OneWay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = TokenAttention(DIM, HEADS, max_candidates=3)

    def forward(self, candidate: Tensor, request: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        return self.attention(request, candidate, CandidateRows.of_offsets(offsets, len(candidate)))


def quantised(make: Callable[[], nn.Module]) -> nn.Module:
    model = nn.Sequential(make())
    apply_recipe(model, "mxfp8", ["*"])
    return model[0]


def self_attention() -> GDPASelfAttention:
    return GDPASelfAttention(DIM, HEADS, max_length=5, qk_norm=True)


def interaction(kind: type[nn.Module], **options: Any) -> OverRequests:
    shared = {"rank": 4, "hidden": [8], "dropout": 0.0, "num_request": 4, "max_candidates": 3}
    return OverRequests(lambda: kind(2, DIM, **shared, **options))


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, DIM)


# A module and its inputs.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "jagged attention": (Rotated, lambda: (tokens(8), OFFSETS)),
    "gdpa": (lambda: GDPABlock(self_attention()), lambda: (tokens(8), OFFSETS)),
    "gdpa pooling": (lambda: GDPAPooling(DIM, HEADS, 2, max_length=5), lambda: (tokens(8), OFFSETS)),
    "pffn": (lambda: PersonalizedFFN(DIM, HEADS, 3, 8, max_length=5), lambda: (tokens(8), OFFSETS, tokens(3, 3))),
    "target attention": (
        lambda: TargetAttention(DIM, HEADS, 2, **LIMITS),
        lambda: (tokens(5, 2), CANDIDATES, tokens(8), OFFSETS),
    ),
    "self and target": (
        lambda: SelfAndTargetAttention(DIM, HEADS, 2, **LIMITS),
        lambda: (tokens(5, 2), CANDIDATES, tokens(8), OFFSETS),
    ),
    "self in a window and target": (
        lambda: SelfAndTargetAttention(DIM, HEADS, 2, window=1, **LIMITS),
        lambda: (tokens(5, 2), CANDIDATES, tokens(8), OFFSETS),
    ),
    "pma": (lambda: PMA(DIM, HEADS, 2, **LIMITS), lambda: (tokens(5, 2), CANDIDATES, tokens(8), OFFSETS)),
    "lce": (lambda: OverRequests(lambda: LCE(2, 3, 4)), lambda: (tokens(5, 2), tokens(3, 4), CANDIDATES)),
    "wukong": (
        lambda: interaction(WukongLayer, num_fmb=2, num_lcb=2),
        lambda: (tokens(5, 2), tokens(3, 4), CANDIDATES),
    ),
    "wukong experts": (
        lambda: interaction(WukongExperts, num_fmb=2, num_lcb=2, num_experts=2, num_layers=2),
        lambda: (tokens(5, 2), tokens(3, 4), CANDIDATES),
    ),
    "cross-layer attention": (lambda: CrossLayerAttention(DIM, HEADS), lambda: (tokens(5, 2), tokens(5, 3))),
    "token networks": (
        lambda: OverRequests(lambda: TokenFeedForward(2, DIM, 16, DIM, shared_dim=DIM, std=0.1), normalize=True),
        lambda: (tokens(5, 2), tokens(3, 2), CANDIDATES),
    ),
    "token networks in mxfp8": (lambda: quantised(lambda: TokenLinear(2, DIM, 64)), lambda: (tokens(5, 2),)),
    "token attention": (OneWay, lambda: (tokens(5, 2), tokens(3, 2), CANDIDATES)),
    "sum kron": (lambda: SumKronLinear(4, 2, DIM, terms=3, out_dim=16), lambda: (tokens(5, 4),)),
    "seed pooling": (
        lambda: SeedPooling(DIM, HEADS, num_seeds=6, num_tokens=2, terms=2, max_length=5),
        lambda: (tokens(8), OFFSETS),
    ),
    "pyramid": (Level, lambda: (tokens(8), OFFSETS, tokens(3, 2))),
    "dhen": (lambda: interaction(DHENLayer), lambda: (tokens(5, 2), tokens(3, 4), CANDIDATES)),
    "moe": (lambda: MoE(DIM, 32, 4, 2, num_shared_experts=1, aux_loss_weight=0.1), lambda: (tokens(8),)),
    "moe in mxfp8": (lambda: quantised(lambda: MoE(DIM, 32, 4, 2)), lambda: (tokens(8),)),
    "linear in mxfp8": (lambda: quantised(lambda: nn.Linear(DIM, 64)), lambda: (tokens(8),)),
}
each = pytest.mark.parametrize("name", MODULES)


def setup(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    return make(), inputs()


def leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)


def loss_of(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    return sum((x.float().sin().sum() for x in (out if isinstance(out, tuple) else (out,))), torch.zeros(()))


def gradients(module: nn.Module, inputs: tuple[Tensor, ...], run: Callable[..., Any] | None = None) -> list[Tensor]:
    """The loss, and of every parameter and floating input the gradient."""
    module.zero_grad()
    given = leaves(inputs)
    loss = loss_of((run or module)(*given))
    loss.backward()
    found = [x.grad for x in (*module.parameters(), *given) if x.is_floating_point()]
    assert all(grad is not None for grad in found)
    return [loss.detach(), *found]


@each
def test_recomputed_in_the_backward(name: str) -> None:
    module, inputs = setup(name)
    expected = gradients(module, inputs)
    for reentrant in (False, True):
        actual = gradients(module, inputs, lambda *x, r=reentrant: checkpoint(module, *x, use_reentrant=r))
        torch.testing.assert_close(actual, expected)


@each
def test_copied_after_a_step_and_loaded(name: str) -> None:
    module, inputs = setup(name)
    expected = gradients(module, inputs)
    again, _ = setup(name)
    again.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), again):
        torch.testing.assert_close(gradients(other, inputs), expected)


@each
def test_made_without_memory(name: str) -> None:
    """On the meta device, then loaded, or moved to a device and initialised there."""
    module, inputs = setup(name)
    expected = module(*inputs)
    with torch.device("meta"):
        assigned, moved = MODULES[name][0](), MODULES[name][0]()
    assigned.load_state_dict(module.state_dict(), assign=True)
    torch.testing.assert_close(assigned(*inputs), expected)
    moved.to_empty(device="cpu")
    for tensor in (*moved.parameters(), *moved.buffers()):
        tensor.detach().fill_(1e30 if tensor.is_floating_point() else 10**6)
    for part in moved.modules():
        if reset := getattr(part, "reset_parameters", None):
            reset()
    assert all(x.isfinite().all() for x in gradients(moved, inputs))
    moved.load_state_dict(module.state_dict())
    torch.testing.assert_close(moved(*inputs), expected)


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    module, inputs = setup(name)
    module.to(dtype)
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    out = module(*inputs)
    assert {x.dtype for x in (out if isinstance(out, tuple) else (out,))} == {dtype}
    assert {x.dtype for x in gradients(module, inputs)[1:]} == {dtype}


@each
def test_scaled_in_fp16_autocast(name: str) -> None:
    module, inputs = setup(name)
    optimizer, scaler = torch.optim.SGD(module.parameters(), 1e-4), torch.amp.GradScaler("cpu")
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(12):  # until the scale has come down to what float16 holds
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(module(*leaves(inputs)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert not any(torch.equal(x, y) for x, y in zip(module.parameters(), before, strict=True))


@each
def test_views_other_offsets_and_modes(name: str) -> None:
    module, inputs = setup(name)
    expected = module(*inputs)
    views = tuple(x.t().contiguous().t() if x.dim() == 2 else torch.stack([x, x], -1)[..., 0] for x in inputs)
    torch.testing.assert_close(module(*views), expected)
    short = tuple(x if x.is_floating_point() else x.int() for x in inputs)
    torch.testing.assert_close(gradients(module, short), gradients(module, inputs))
    with torch.inference_mode():
        torch.testing.assert_close(module(*(x.clone() for x in inputs)), expected)


@each
def test_nothing_in_the_batch(name: str) -> None:
    module, inputs = setup(name)
    nothing = tuple(x[:0] if x.is_floating_point() else x[:1] for x in inputs)
    assert all((x == 0).all() for x in gradients(module, nothing) if x.numel())


@each
def test_parts_are_frozen(name: str) -> None:
    module, inputs = setup(name)
    everything = gradients(module, inputs)[1:]
    parameters = list(module.parameters())
    for chosen in range(len(everything)):
        given = [x.detach().clone() for x in inputs]
        candidates = [*parameters, *(x for x in given if x.is_floating_point())]
        for place, tensor in enumerate(candidates):
            tensor.requires_grad_(place == chosen)
            tensor.grad = None
        loss_of(module(*given)).backward()
        torch.testing.assert_close(candidates[chosen].grad, everything[chosen])

"""Hooks run on every layer, wrappers and replaced forwards are called, where operators else read weights directly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from modules.core.vanilla import is_vanilla
from modules.layers.feed_forward.mlp import MLP
from modules.models.baselines import ActivationUnit
from modules.models.interformer.arches import Gating
from tests.modules.factories import random_batch, random_spec
from tests.modules.models.test_models import Ranking
from tests.modules.test_drop_in import DIM, MODULES, gradients, tokens

LAYERS = MODULES | {
    "mlp": (lambda: MLP(DIM, [16, 8], 4), lambda: (tokens(5),)),
    "mlp times a factor": (lambda: MLP(DIM, [16], DIM), lambda: (tokens(5), tokens(5))),
    "gating": (lambda: Gating(DIM), lambda: (tokens(5, 2),)),
}


def setup(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    make, inputs = LAYERS[name]
    return make(), inputs()


def layers(module: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in module.named_modules() if type(layer) in (nn.Linear, nn.SiLU)}


REGISTER: dict[str, Callable[[nn.Module, Callable[[], None]], Any]] = {
    "forward": lambda layer, note: layer.register_forward_hook(lambda *_: note()),
    "forward pre": lambda layer, note: layer.register_forward_pre_hook(lambda *_: note()),
    "backward": lambda layer, note: layer.register_full_backward_hook(lambda *_: note()),
    "backward pre": lambda layer, note: layer.register_full_backward_pre_hook(lambda *_: note()),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", LAYERS)
def test_hooks_of_every_layer_run_and_nothing_else_changes(name: str, kind: str) -> None:
    module, inputs = setup(name)
    expected, ran = gradients(module, inputs), Counter[str]()
    handles = [
        REGISTER[kind](layer, lambda name=name: ran.update([name]))  # type: ignore[misc]
        for name, layer in layers(module).items()
    ]
    found = gradients(module, inputs)
    assert ran.keys() == layers(module).keys()
    # Sums of the products of bias and factor are taken in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for handle in handles:
        handle.remove()
    assert all(is_vanilla(layer, type(layer)) for layer in layers(module).values())


def test_hooks_run_in_the_activation_units_of_din() -> None:
    spec = random_spec()
    model, batch, ran = Ranking("din", spec), random_batch(spec), Counter[str]()
    units = [unit for unit in model.arch.modules() if isinstance(unit, ActivationUnit)]
    expected = model(batch)
    for unit in units:
        for layer in layers(unit).values():
            layer.register_forward_hook(lambda *_: ran.update(["layer"]))
    torch.testing.assert_close(model(batch), expected)
    assert ran["layer"] == sum(len(layers(unit)) for unit in units) > 0


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@pytest.mark.parametrize("name", ["lce", "self and target", "dhen", "mlp", "mlp times a factor", "gating"])
def test_what_layers_are_replaced_by_is_called(name: str) -> None:
    merged, inputs = setup(name)
    wrapped, _ = setup(name)
    for path, layer in layers(wrapped).items():
        if isinstance(layer, nn.Linear):
            wrapped.set_submodule(path, LoRA(layer))
            merged.get_submodule(path).weight.data += wrapped.get_submodule(path).up @ wrapped.get_submodule(path).down
    torch.testing.assert_close(wrapped(*inputs), merged(*inputs), rtol=1e-4, atol=1e-4)


def test_parametrizations_and_replaced_forwards_are_seen() -> None:
    module, inputs = setup("mlp")
    for layer in layers(module).values():
        if isinstance(layer, nn.Linear):
            register_parametrization(layer, "weight", Halved())
    halved = module(*inputs)
    module, _ = setup("mlp")
    for layer in layers(module).values():
        if isinstance(layer, nn.Linear):
            layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight / 2, layer.bias)  # type: ignore[misc]
    torch.testing.assert_close(module(*inputs), halved)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2

"""Feature interaction against its formulas."""

from __future__ import annotations

import torch

from modules.interaction import CrossNet, DHENLayer, DotInteraction
from modules.mlp import linear_flops


def test_dot_interaction_is_the_upper_triangle():
    tokens = torch.randn(4, 3, 5, dtype=torch.float64)
    expected = [(tokens[:, i] * tokens[:, j]).sum(-1) for i in range(3) for j in range(i + 1, 3)]
    torch.testing.assert_close(DotInteraction(3, scale=0.5)(tokens), 0.5 * torch.stack(expected, 1))
    assert DotInteraction(3).num_pairs == 3
    assert DotInteraction(1)(tokens[:, :1]).shape == (4, 0)


def test_cross_net_multiplies_by_its_input_in_every_layer():
    net = CrossNet(width=6, num_layers=2, rank=2).double()
    x0 = torch.randn(4, 6, dtype=torch.float64)
    x = x0
    for down, up in zip(net.down, net.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    torch.testing.assert_close(net(x0), x)


def test_dhen_layer_normalises_the_ensemble_plus_shortcut():
    layer = DHENLayer(3, 4, rank=2, hidden=[5], dropout=0.0).double()
    tokens = torch.randn(2, 3, 4, dtype=torch.float64)
    gram = tokens @ tokens.mT / 4**0.5
    dot = layer.dot_output(torch.stack([gram[:, 0, 1], gram[:, 0, 2], gram[:, 1, 2]], dim=1)).view(2, 3, 4)
    y = dot + layer.cross(tokens.flatten(1)).view(2, 3, 4) + tokens
    torch.testing.assert_close(layer(tokens), y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert layer(tokens[:0]).shape == (0, 3, 4)
    assert layer.flops() == 2 * 3 * 3 * 4 + linear_flops(layer.dot_output) + linear_flops(layer.cross)

"""Operators on padded tensors [C, longest, d], written out for references of whole models in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modules.layers.attention.gdpa import PersonalizedFFN
from modules.layers.interaction.wukong import WukongLayer


def norm(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def layer_norm(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5)


def heads(x: Tensor, number: int) -> Tensor:
    """[..., L, d] -> [..., H, L, d / H]."""
    return x.unflatten(-1, (number, -1)).transpose(-3, -2)


def joined(x: Tensor) -> Tensor:
    """[..., H, L, d / H] -> [..., L, d]."""
    return x.transpose(-3, -2).flatten(-2)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [..., H, L, d / H] turned by angles [..., L, d / H / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos()[..., None, :, :], angle.sin()[..., None, :, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[..., H, Q, e] over keys where `seen` [..., Q, L]; zeros where a query sees none -> [..., Q, d]."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen[..., None, :, :], float("-inf"))
    return joined(scores.softmax(-1).nan_to_num(0.0) @ v)


def gdpa(q: Tensor, k: Tensor, v: Tensor, module: Any) -> Tensor:
    """[..., H, Q, e] with GELU and QK-norm, by the scales of a module; keys of zeros contribute nothing."""
    weights = torch.nn.functional.gelu(norm(q) @ norm(k).mT * module.score_scale) * module.out_scale
    return joined(weights @ v)


def block(pffn: PersonalizedFFN, s: Tensor, context: Tensor) -> Tensor:
    """q + RMSNorm(GDPA(LN(q)) + LN(q)), GDPA a network of each head with keys and values mixed from the context."""
    number, normed = pffn.num_heads, layer_norm(s)
    k, v = heads(pffn.mix[0::2] @ context, number), heads(pffn.mix[1::2] @ context, number)
    return s + norm(gdpa(heads(normed, number), k, v, pffn) + normed)


def weight_of(lce: Any) -> Tensor:
    """[num_out, request tokens then candidate tokens]."""
    parts = [lce.candidate.weight] if lce.request is None else [lce.request.weight, lce.candidate.weight]
    return torch.cat(parts, 1)


def wukong(layer: WukongLayer, x: Tensor) -> Tensor:
    """A layer with the optimised machine on all tokens of a candidate, the request's first: [C, n, d]."""
    dim = x.shape[2]
    products = x @ (weight_of(layer.project) @ x).mT
    machine = layer.fmb(norm(products.flatten(1) * dim**-0.5)).unflatten(1, (-1, dim))
    mixed = torch.cat([machine, weight_of(layer.lcb) @ x], 1)
    return norm(mixed + (x if layer.residual is None else weight_of(layer.residual) @ x))

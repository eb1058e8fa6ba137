"""Routed mixture of SwiGLU experts, a drop-in feed-forward. See docs/moe.md for the mathematics and the choices."""

from modules.layers.moe.balancing import load_balancing_loss, update_router_biases
from modules.layers.moe.dispatcher import Dispatcher
from modules.layers.moe.exchange import AllGather, AllToAll
from modules.layers.moe.experts import Experts
from modules.layers.moe.layer import MoE
from modules.layers.moe.router import Router, Routing

__all__ = [
    "AllGather",
    "AllToAll",
    "Dispatcher",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "load_balancing_loss",
    "update_router_biases",
]

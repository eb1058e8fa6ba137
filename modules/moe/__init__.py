"""Routed mixture of SwiGLU experts, a drop-in feed-forward. See docs/moe.md for the mathematics and the choices."""

from modules.moe.balancing import load_balancing_loss, update_router_biases
from modules.moe.dispatcher import Dispatcher
from modules.moe.exchange import AllGather, AllToAll, ByKind
from modules.moe.experts import Experts
from modules.moe.layer import MoE
from modules.moe.router import Router, Routing

__all__ = [
    "AllGather",
    "AllToAll",
    "ByKind",
    "Dispatcher",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "load_balancing_loss",
    "update_router_biases",
]

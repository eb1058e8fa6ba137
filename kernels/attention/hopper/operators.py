"""`jagged_attention` by the Hopper kernels, as an operator."""

from __future__ import annotations

from functools import partial

from kernels.attention.gradients import gradients_in_projection
from kernels.attention.hopper import backward, forward
from kernels.attention.operator import attention_operator

attention = attention_operator(
    "hopper",
    forward.attention_forward,
    partial(backward.attention_backward, gradients=gradients_in_projection),
    features=False,
    gradients=gradients_in_projection,
)

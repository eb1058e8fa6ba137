"""`jagged_attention` by the Hopper kernels, as an operator."""

from __future__ import annotations

from kernels.attention.hopper import backward, forward
from kernels.attention.operator import attention_operator

attention = attention_operator("hopper", forward.attention_forward, backward.attention_backward, features=False)

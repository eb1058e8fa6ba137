"""`jagged_attention` by the Triton kernels, as operators: for every shape, and for a few queries a row."""

from __future__ import annotations

from kernels.attention.gradients import gradients_beside
from kernels.attention.operator import attention_operator
from kernels.attention.triton import backward, decode, forward

attention = attention_operator("triton", forward.forward, backward.backward)
few_queries = attention_operator("decode", decode.forward, decode.backward, features=False, gradients=gradients_beside)

"""`gdpa` by the Triton kernels, as an operator."""

from __future__ import annotations

from kernels.gdpa.operator import gdpa_operator
from kernels.gdpa.triton import backward, forward

gdpa = gdpa_operator("triton", forward.forward, backward.backward, features=True)

"""`gdpa` by the Hopper kernels, as an operator."""

from __future__ import annotations

from kernels.gdpa.hopper import backward, forward
from kernels.gdpa.operator import gdpa_operator

gdpa = gdpa_operator("hopper", forward.forward, backward.backward)

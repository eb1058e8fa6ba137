"""Sums without rounding: the same for any order of the numbers, however they are divided into parts."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np

PIECE = 1 << 20  # numbers a step: sums of so many half mantissas are whole numbers that float64 holds
MANTISSA, HALF = 53, 26


class ExactSum:
    """Adds finite float64; the mantissas of each exponent are summed as integers."""

    def __init__(self) -> None:
        self._by_exponent: Counter[int] = Counter()

    def add(self, values: np.ndarray) -> None:
        for begin in range(0, len(values), PIECE):
            share, exponent = np.frexp(values[begin : begin + PIECE])
            mantissa = (share * 2.0**MANTISSA).astype(np.int64)
            least = int(exponent.min())
            for half, shift in ((mantissa >> HALF, HALF), (mantissa & (2**HALF - 1), 0)):
                for above, total in enumerate(np.bincount(exponent - least, weights=half).tolist()):
                    if total:
                        self._by_exponent[least + above + shift] += int(total)

    def value(self) -> Fraction:
        return sum((total * Fraction(2) ** (e - MANTISSA) for e, total in self._by_exponent.items()), Fraction(0))


class Moments:
    """Mean and standard deviation of numbers, correctly rounded; NaN is left out."""

    def __init__(self) -> None:
        self.rows = self.count = 0
        self._sum, self._squares = ExactSum(), ExactSum()

    def add(self, values: np.ndarray) -> None:
        """values [N] float64, at most 1e150 in size."""
        self.rows += len(values)
        values = values[~np.isnan(values)]
        self.count += len(values)
        self._sum.add(values)
        # The square and its rounding error, which is exact as well (Dekker 1971, "A floating-point technique ...").
        square, high = values * values, values * (2.0**27 + 1)
        high -= high - values
        low = values - high
        self._squares.add(square)
        self._squares.add(((high * high - square) + 2 * high * low) + low * low)

    def mean(self) -> float:
        return float(self._sum.value() / self.count) if self.count else 0.0

    def std(self) -> float:
        """0 where nothing varies."""
        if not self.count:
            return 0.0
        mean = self._sum.value() / self.count
        return math.sqrt(self._squares.value() / self.count - mean * mean)

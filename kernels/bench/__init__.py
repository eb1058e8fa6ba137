"""Benchmarks of the kernels: `python -m kernels.bench FAMILY`, where bench/cases/FAMILY.py defines `cases(device)`.

A case makes one problem: inputs, contenders that solve it, and a check of their results. A contender whose result fails
the check is not timed. Contenders are timed in turns, one call each per round with the L2 cache flushed before each, so
that clock drift affects all of them alike; the median and the 20th and 80th percentiles are kept.
"""

from kernels.bench.case import Case, Problem, Runner, backends_of, check_equal, check_relative_error, runner_of
from kernels.bench.environment import commit

__all__ = ["Case", "Problem", "Runner", "backends_of", "check_equal", "check_relative_error", "commit", "runner_of"]

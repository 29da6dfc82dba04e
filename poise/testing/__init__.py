"""What an implementation must get right, for tests and benchmarks: a table of calls, and how exact answers must be.

`CASES` names the calls, `arguments(name, dtype)` makes one. `truth(**arguments)` computes the exact answer in float64
and a naive one in the call's own precision; `check_out` and `check_stats` raise AssertionError when a result is further
from the exact one than the naive one excuses. `gradient_truth` and `check_gradients` do the same for gradients.
`isas()` names the instruction sets that POISE_ISA may force here.
Knows no implementation but the reference, and no test runner.
"""

from poise.testing import decode_cases as _decode_cases  # noqa: F401  (their imports complete CASES)
from poise.testing import edge_cases as _edge_cases  # noqa: F401
from poise.testing.budget import Truth, check_out, check_stats, double, relative_l2, truth
from poise.testing.cases import CASES, Arguments, Inputs, arguments
from poise.testing.gradients import (
    STATISTICS,
    GradientTruth,
    Incoming,
    check_gradients,
    differentiate,
    gradient_truth,
    random_incoming,
)
from poise.testing.machine import isas

__all__ = [
    "CASES",
    "STATISTICS",
    "Arguments",
    "GradientTruth",
    "Incoming",
    "Inputs",
    "Truth",
    "arguments",
    "check_gradients",
    "check_out",
    "check_stats",
    "differentiate",
    "double",
    "gradient_truth",
    "isas",
    "random_incoming",
    "relative_l2",
    "truth",
]

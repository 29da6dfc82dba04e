"""Fixtures for every test: a fixed seed, the native kernels or a skip, and each implementation in turn.

The kernels' scratch memory is filled with NaN before every call, so that nothing unwritten is ever read unnoticed.
With POISE_REQUIRE_NATIVE=1, as `make test` sets it, a missing native library ends the run instead of skipping tests.
"""

from __future__ import annotations

import os

os.environ["POISE_POISON"] = "1"  # the library looks once, at its first call

import pytest
import torch

from poise.kernels import ops


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("POISE_REQUIRE_NATIVE") == "1" and not ops.available():
        raise pytest.UsageError(f"POISE_REQUIRE_NATIVE=1, but the native kernels are missing: {ops.why_missing()}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def native() -> None:
    """For tests of the native kernels."""
    if not ops.available():
        pytest.skip(ops.why_missing())


@pytest.fixture(params=["cpu", "blockwise", "reference"])
def impl(request: pytest.FixtureRequest) -> str:
    """Every implementation in turn; pass it as `impl=`."""
    if request.param == "cpu":
        request.getfixturevalue("native")
    return str(request.param)

"""The quick logarithm of `mix-tr` and `mix-trace` is never off by more than their margin allows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from simlab.policy.transitions import NEAR, near_log


@njit
def near_logs(x: Any, found: Any) -> None:
    for i in range(x.shape[0]):
        found[i] = near_log(x[i])


def test_near_log_is_never_off_by_more_than_it_says() -> None:
    two = 2.0 ** np.arange(-1000, 1000)
    x = np.concatenate(
        [np.geomspace(1e-9, 1e300, 100_000), np.linspace(1, 2, 100_000), two, np.nextafter(two, 0)]
    )
    found = np.empty_like(x)
    near_logs(x, found)
    assert np.abs(found - np.log(x)).max() < 7.85e-5 < NEAR

"""How every function of a policy is compiled: inlined into the kernel, without reference counts.

Arrays in a policy's state outlive the run, so counting references to them on every call would buy
nothing and costs half the speed (17 against 45 M lookups/s for LRU on a real trace). The price: a
compiled function cannot allocate. `init` can, and the loader says so when a hook tries.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from numba import njit

_BLAS = "scipy.linalg.cython_blas"


def _load_array_functions() -> None:
    """Load numba's array functions without SciPy, a third of a second at every start.

    As it loads them, numba probes for SciPy's BLAS (numba/np/arraymath.py, ``_check_blas``), only
    for ``np.convolve`` to choose. A compiled function that multiplies matrices asks again.
    """
    if _BLAS in sys.modules:
        return
    sys.modules[_BLAS] = None  # type: ignore[assignment]  # makes the import fail at once
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        del sys.modules[_BLAS]


_load_array_functions()

#: Only compiled code calls these functions, so they need no way in from Python (a third of the time
#: to compile a policy).
_INSIDE = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def cached_jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``njit`` with numba's disk cache where it finds a place for one, without it elsewhere (a
    read-only install and no home, or a module without a file).
    """

    def compile_(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:
            return njit(**options)(function)

    return compile_


def kernel_jit(function: Callable[..., Any]) -> Any:
    """Compile a building block: always inlined into its caller."""
    return njit(function, forceinline=True, **_INSIDE)


def policy_jit(function: Callable[..., Any]) -> Any:
    """Compile a policy's function; LLVM decides what is small enough to inline."""
    return njit(function, **_INSIDE)

"""From a policy file to a checked Policy: import it, check what it declares, bind its functions.

A policy file is executed under a private module name made of its name and hash, so that two
versions of one file never meet and no top-level folder becomes an import name.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from simlab.errors import PolicyError, UsageError
from simlab.policy.jit import policy_jit
from simlab.policy.protocol import HOOKS, NEEDS, READS_FUTURE, Geometry, Group, Param
from simlab.policy.sources import own_sources

REQUIRED = ("init", "victim")


@dataclass(frozen=True)
class Policy:
    """A loaded policy.

    Attributes:
        name, version, source, params, needs, bound, declines: as declared (see protocol.py).
        doc: the file's docstring.
        path: the file.
        hash: over the file and its own imports.
        module_name: private import name, unique per hash.
        init: the policy's init function, plain Python.
        hooks: name -> compiled function, for the hooks the policy defines.
    """

    name: str
    version: int
    source: str
    params: Mapping[str, Param]
    needs: tuple[str, ...]
    bound: bool
    declines: bool
    doc: str
    path: Path
    hash: str
    module_name: str
    init: Callable[..., Any]
    hooks: Mapping[str, Any]

    @property
    def label(self) -> str:
        """As printed: ``lru@1``."""
        return f"{self.name}@{self.version}"

    @property
    def summary(self) -> str:
        """The first sentence of its docstring, on one line, cut if long."""
        first = " ".join(self.doc.split("\n\n")[0].split())
        end = re.search(r"[.;] ", first)
        text = first if end is None else first[: end.start()]
        return textwrap.shorten(text.rstrip("."), 100, placeholder=" ...")

    @property
    def reads_future(self) -> bool:
        """It needs the next use of each key: a bound."""
        return "next_use" in self.needs

    @property
    def reads_weights(self) -> bool:
        """It needs router weights: not every trace has them."""
        return "weights" in self.needs

    @property
    def protects_present(self) -> bool:
        """A victim of the present set stops the run; only the bypassing bound may name one."""
        return not (self.bound and self.declines and self.reads_future)

    def new_state(
        self,
        group: Group,
        params: Mapping[str, float],
        *,
        uses: npt.NDArray[np.int64] | None = None,
        layer_bytes: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        """Call the policy's init.

        Args:
            uses: int64 [keys], for a policy that needs them; default none.
            layer_bytes: int64 [layers of the group]; default 1 each.

        Raises:
            UsageError: a parameter is not allowed. PolicyError: init failed.
        """
        values = self.values(params)
        geometry = Geometry(*group)
        if "uses" in self.needs:
            geometry.uses = np.zeros(group.keys, np.int64) if uses is None else uses
        if "bytes" in self.needs:
            ones = np.ones(group.layers, np.int64)
            geometry.layer_bytes = ones if layer_bytes is None else layer_bytes
        try:
            state = self.init(geometry, group.slots, values)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            line = _line_in(exc, self.path)
            raise PolicyError(
                f"policy {self.name} ({self.path}{line}): init() failed:"
                f" {type(exc).__name__}: {exc}"
            ) from None
        if not (isinstance(state, tuple) and hasattr(state, "_fields")):
            raise PolicyError(
                f"policy {self.name} ({self.path}): init() must return a NamedTuple of arrays, not"
                f" {type(state).__name__}"
            )
        return state

    def values(self, given: Mapping[str, float] | None = None) -> dict[str, float]:
        """Parameter values: the defaults with ``given`` on top.

        Raises:
            UsageError: unknown parameter, not a number, or out of range.
        """
        values = {name: param.default for name, param in self.params.items()}
        for name, value in (given or {}).items():
            if name not in values:
                close = difflib.get_close_matches(name, values, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                known = ", ".join(values) or "none"
                raise UsageError(
                    f"policy {self.name} has no parameter {name!r}{hint} (it has: {known})"
                )
            param = self.params[name]
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise UsageError(
                    f"parameter {name} of {self.name} must be a number, not {value!r}"
                ) from None
            if not (math.isfinite(number) and param.low <= number <= param.high):
                raise UsageError(
                    f"parameter {name} of {self.name} must be {param.low:g}..{param.high:g},"
                    f" not {number:g}"
                )
            values[name] = number
        return values


_loaded: dict[str, Policy] = {}


def loaded(module_name: str) -> Policy:
    """The policy behind a private module name; generated kernels find their hooks through it."""
    return _loaded[module_name]


def load_policy_file(path: Path) -> Policy:
    """Load and check one policy file.

    Raises:
        PolicyError: unreadable, not Python, fails on import, or does not declare a policy.
    """
    sources = own_sources(path)
    digest = hashlib.sha256()
    for file, source in sources.items():
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(source).digest())
    content_hash = digest.hexdigest()[:16]
    stem = "".join(c if c.isalnum() else "_" for c in path.stem)
    module_name = f"simlab_policy_{stem}_{content_hash}"
    if module_name in _loaded:
        return _loaded[module_name]
    module = _execute(path, module_name, sources)
    policy = _checked(path, module, content_hash, _helpers(sources))
    _loaded[module_name] = policy
    return policy


def _execute(path: Path, module_name: str, sources: Mapping[Path, bytes]) -> types.ModuleType:
    module = types.ModuleType(module_name)
    module.__file__ = str(path)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    sys.path.append(folder)
    try:
        exec(compile(sources[path.resolve()], str(path), "exec"), module.__dict__)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # SystemExit too: a policy file must not end the command
        del sys.modules[module_name]
        line = _line_in(exc, path)
        raise PolicyError(f"{path}{line}: {type(exc).__name__}: {exc}") from None
    finally:
        sys.path.remove(folder)
        # helpers beside the policy are bound by now; forget them, so that another policy's helper
        # of the same name, or an edited one, is read afresh
        helpers = _helpers(sources)
        for name, other in list(sys.modules.items()):
            if other is not module and _is_one_of(other, helpers):
                del sys.modules[name]
    return module


def _helpers(sources: Mapping[Path, bytes]) -> set[Path]:
    """The policy author's own files: all sources but simlab's building blocks."""
    package = Path(__file__).resolve().parent.parent
    bundled = package / "_bundled"  # where an installed wheel has the policies
    return {
        file for file in sources if file.is_relative_to(bundled) or not file.is_relative_to(package)
    }


def _is_one_of(module: Any, files: set[Path]) -> bool:
    file = getattr(module, "__file__", None)
    # by name first: there may be thousands of modules, and resolving a path asks the disk
    return (
        isinstance(file, str)
        and os.path.basename(file) in {each.name for each in files}
        and Path(file).resolve() in files
    )


def _line_in(exc: BaseException, path: Path) -> str:
    trace = exc.__traceback__
    line = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _checked(
    path: Path, module: types.ModuleType, content_hash: str, own_files: set[Path]
) -> Policy:
    declared = vars(module)
    for constant, kind in (("NAME", str), ("VERSION", int), ("SOURCE", str)):
        if not isinstance(declared.get(constant), kind):
            raise PolicyError(f"{path} lacks {constant} = <{kind.__name__}>")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", declared["NAME"]):
        raise PolicyError(f"{path}: NAME must be small letters, digits and -._, at most 64 of them")
    if not 0 < declared["VERSION"] < 2**31:
        raise PolicyError(f"{path}: VERSION must be 1, 2, 3 ..., not {declared['VERSION']}")
    for function in REQUIRED:
        if not isinstance(declared.get(function), types.FunctionType):
            arguments = ["geometry", "slots", "params"]
            if function in HOOKS:
                arguments = ["state", "cache", "group", *HOOKS[function]]
            raise PolicyError(f"{path} lacks the function {function}({', '.join(arguments)})")
    hooks = {hook: declared[hook] for hook in HOOKS if hook in declared}
    for hook, function in hooks.items():
        if not isinstance(function, types.FunctionType):
            raise PolicyError(f"{path}: {hook} must be a function of the file")
    for hook, function in {"init": declared["init"], **hooks}.items():
        expected = 3 if hook == "init" else 3 + len(HOOKS[hook])
        count = len(inspect.signature(function).parameters)
        if count != expected:
            raise PolicyError(f"{path}: {hook}() takes {count} arguments, it is given {expected}")
    params = declared.get("PARAMS", {})
    if not isinstance(params, dict) or not all(
        isinstance(name, str) and isinstance(p, Param) and _is_finite(p.default)
        for name, p in params.items()
    ):
        raise PolicyError(
            f"{path}: PARAMS must be a dict of name -> Param(default, low, high, doc)"
        )
    needs = declared.get("NEEDS", ())
    if not isinstance(needs, tuple | list) or not all(isinstance(n, str) for n in needs):
        raise PolicyError(f"{path}: NEEDS must be a tuple of names, such as ('next_use',)")
    unknown = [need for need in needs if need not in NEEDS]
    if unknown:
        raise PolicyError(f"{path}: NEEDS {unknown[0]!r}; known: {', '.join(NEEDS)}")
    if set(needs) & set(READS_FUTURE) and not declared.get("BOUND", False):
        raise PolicyError(f"{path} reads the future (NEEDS), so it must say BOUND = True")
    if "admit" in hooks and not declared.get("DECLINES", False):
        raise PolicyError(f"{path} has admit(), so it must say DECLINES = True")
    return Policy(
        name=declared["NAME"],
        version=declared["VERSION"],
        source=declared["SOURCE"],
        params=params,
        needs=tuple(needs),
        bound=bool(declared.get("BOUND", False)),
        declines=bool(declared.get("DECLINES", False)),
        doc=inspect.cleandoc(module.__doc__ or ""),
        path=path,
        hash=content_hash,
        module_name=module.__name__,
        init=declared["init"],
        hooks=_bind(hooks, own_files),
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _bind(hooks: Mapping[str, Any], own_files: set[Path]) -> dict[str, Any]:
    """Compile the hooks and every plain function of the policy's own that they reach."""
    if numba.config.DISABLE_JIT:
        return dict(hooks)
    compiled: dict[Any, Any] = {}

    def is_own(thing: Any) -> bool:
        return (
            isinstance(thing, types.FunctionType)
            and Path(thing.__code__.co_filename).resolve() in own_files
        )

    def bind(function: Any) -> Any:
        if not is_own(function):
            return function
        if function not in compiled:
            compiled[function] = policy_jit(function)
            names = function.__code__.co_names
            for name in names:
                used = function.__globals__.get(name)
                if is_own(used):
                    function.__globals__[name] = bind(used)
                elif isinstance(used, types.ModuleType):
                    for member in names:
                        if is_own(getattr(used, member, None)):
                            setattr(used, member, bind(getattr(used, member)))
        return compiled[function]

    return {name: bind(function) for name, function in hooks.items()}

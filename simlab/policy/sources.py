"""Which source files a policy is made of: its own file and everything of its own that it imports.

The hash over these files names the compiled policy, so that editing a helper changes the next
result. Standard library and installed packages do not count (their versions are in the provenance);
simlab's own building blocks do.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import sys
from pathlib import Path

from simlab.errors import PolicyError

_PACKAGE = Path(__file__).resolve().parent.parent


def parse(path: Path) -> tuple[bytes, frozenset[str]]:
    """A Python file's bytes and the dotted names that it imports.

    Raises:
        PolicyError: the file cannot be read or is not Python; names the line.
    """
    try:
        source = path.read_bytes()
        return source, _imported_names(source)
    except OSError as exc:
        raise PolicyError(f"cannot read policy file {path}: {exc.strerror}") from None
    except SyntaxError as exc:
        line = "" if exc.lineno is None else f", line {exc.lineno}"
        raise PolicyError(f"{path}{line}: {exc.msg}") from None
    except ValueError as exc:
        raise PolicyError(f"{path} is not a Python file: {exc}") from None


def own_sources(path: Path) -> dict[Path, bytes]:
    """The policy's file and its own imports, transitively: resolved path -> bytes.

    Sorted by file name and text, so that a hash over them does not depend on where simlab lies.
    """
    found: dict[Path, bytes] = {}
    waiting = [path.resolve()]
    while waiting:
        here = waiting.pop()
        if here in found:
            continue
        found[here], names = parse(here)
        for name in names:
            waiting.extend(_files_of(name, path.resolve().parent))
    return dict(sorted(found.items(), key=lambda item: (item[0].name, item[1])))


@functools.lru_cache(maxsize=256)
def _imported_names(source: bytes) -> frozenset[str]:
    # remembered by the text itself, so that no edit is missed: parsing is most of loading a policy
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _files_of(name: str, folder: Path) -> list[Path]:
    """The files behind a dotted module name, if they are the policy author's or simlab's."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names:
        return []
    if parts[0] == "simlab":
        search = [str(_PACKAGE.parent)]
    else:
        search = [*sys.path, str(folder)]
    files: list[Path] = []
    for part in parts:
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            break
        if spec.origin and spec.origin.endswith(".py"):
            files.append(Path(spec.origin).resolve())
        search = list(spec.submodule_search_locations or [])
        if not search:
            break
    if parts[0] == "simlab":
        return files
    # by folder name, for packages may be lent by another environment or by the system
    return [f for f in files if not {"site-packages", "dist-packages"} & set(f.parts)]

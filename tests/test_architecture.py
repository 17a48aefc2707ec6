"""Data flows one way: who may import whom, checked on the source of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simlab.cli import COMMANDS

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "simlab"

# Left to right; a folder imports itself and folders to its left.
ORDER = [
    "result", "trace", "model", "policy", "replay", "cost", "analysis", "sweep", "capture", "live",
    "report", "cli",
]  # fmt: skip
MODULES = {"errors", "resources", "cache_folder", "whole_file"}  # may be imported by every folder
FOR_ALL = {*MODULES, ""}  # "": the version in simlab/__init__.py
# capture and live stand beside sweep; a report reads result files, never the simulator
NARROWER = {
    "capture": set(ORDER[: ORDER.index("sweep")]),
    "live": {*ORDER[: ORDER.index("sweep")], "capture"},
    "report": {"result"},
    "result": set(),
    "errors": set(),
    "cache_folder": {"errors"},
    "whole_file": {"errors"},
    "resources": {"errors"},
}
TORCH = {"torch", "transformers", "safetensors", "tokenizers"}


def imports(tree: ast.AST, *, everywhere: bool = True) -> Iterator[str]:
    """Dotted names of the imported modules; ``everywhere=False``: those of the top level only."""
    nodes = ast.walk(tree) if everywhere else iter(getattr(tree, "body", []))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module
            # "from simlab import errors" names a module in the second part
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def part(dotted: str) -> str:
    """The folder or top-level module of simlab that a dotted name is in; "" for simlab itself."""
    names = dotted.split(".")
    known = {*ORDER, *MODULES}
    return names[1] if len(names) > 1 and names[1] in known else ""


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_folders_are_those_of_the_architecture() -> None:
    assert SOURCES
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert folders <= set(ORDER)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_to_its_left(path: Path) -> None:
    here = part(".".join(("simlab", *path.relative_to(PACKAGE).with_suffix("").parts)))
    if path == PACKAGE / "__main__.py":
        allowed = {"cli"}
    elif path == PACKAGE / "__init__.py":
        allowed = set()
    else:
        allowed = NARROWER.get(here, set(ORDER[: ORDER.index(here)]) if here in ORDER else set())
        allowed = allowed | {here}
        if here in ORDER:
            allowed |= FOR_ALL
    used = {part(name) for name in imports(parse(path)) if name.split(".")[0] == "simlab"}
    assert used <= allowed, f"{path.name} may not import {sorted(used - allowed)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_is_imported_by_capture_and_live_only(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] not in ("capture", "live"):
        assert not TORCH & {name.split(".")[0] for name in imports(parse(path))}


@pytest.mark.parametrize("module", ["__init__", *(module for module, _ in COMMANDS.values())])
def test_a_command_imports_heavy_modules_only_when_run(module: str) -> None:
    for name in imports(parse(PACKAGE / "cli" / f"{module}.py"), everywhere=False):
        top = name.split(".")[0]
        light = top in sys.stdlib_module_names or top == "click"
        assert light or (top == "simlab" and part(name) in {*FOR_ALL, "cli"}), name


@pytest.mark.parametrize("path", sorted((REPO / "policies").glob("*.py")), ids=lambda p: p.name)
def test_a_policy_imports_only_what_kernels_can_use(path: Path) -> None:
    for name in imports(parse(path)):
        top = name.split(".")[0]
        ours = top == "simlab" and part(name) == "policy"
        assert ours or top in {"math", "typing", "numpy", "numba", "__future__"}, name

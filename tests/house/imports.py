"""Counts import circles: `python -m tests.house.imports` prints them; the exit code is their number, at most 99.

Every import counts, those inside functions and those for type checking only too. Two kinds of circle are looked for:
between files, and between the children of one package (its files and its folders as wholes), so that folders have an
order as well: if `training/` imports from `measuring/`, nothing in `measuring/` imports from `training/`.
"""

from __future__ import annotations

import ast
import gc
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("facility", "coordinator")

together = pytest.mark.xdist_group("sources of the product")
"""Tests that read all of the product: one process runs them, and each file is parsed once."""

Graph = dict[str, set[str]]


@cache
def parsed(text: str) -> ast.Module:
    """The tree of a file's text, which no caller changes."""
    gc.disable()  # it would look through the trees of all files before, again and again
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a file's text: to walk a tree takes half as long as to parse it."""
    return tuple(ast.walk(parsed(text)))


def modules(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> dict[str, Path]:
    """Files by dotted name; a package's `__init__.py` has the package's name."""
    found = {}
    for path in sorted(file for package in packages for file in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(path: Path) -> set[str]:
    """Absolute module names that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names: set[str] = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names.add(stem)
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The files of `known` that this one imports."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            found |= {_module(alias.name, known) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            found |= {_module(f"{base}.{alias.name}", known) for alias in node.names}
    return found - {"", name}


def _module(dotted: str, known: dict[str, Path]) -> str:
    """The longest beginning of a dotted name that is a file; empty: none is."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted


def files(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> Graph:
    """Which file imports which."""
    known = modules(root, packages)
    return {name: imports(name, path, known) for name, path in known.items()}


def children(graph: Graph) -> dict[str, Graph]:
    """For each package, which of its children (a file or a folder) imports from which other."""
    found: dict[str, Graph] = {}
    for importer, imported in graph.items():
        for other in imported:
            one, two = importer.split("."), other.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
            if shared is None:
                continue  # a package's __init__ and what is inside the package
            package = ".".join(one[:shared])
            siblings = found.setdefault(package, {})
            siblings.setdefault(".".join(one[: shared + 1]), set()).add(".".join(two[: shared + 1]))
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach one another, each sorted."""
    left = {node: set(others) for node, others in graph.items()}
    found = []
    while True:
        try:
            TopologicalSorter(left).prepare()
            return sorted(found)
        except CycleError as error:
            group = _strongly_connected(error.args[1][0], left)
            found.append(sorted(group))
            left = {node: others - group for node, others in left.items() if node not in group}


def _strongly_connected(start: str, graph: Graph) -> set[str]:
    """All nodes that `start` reaches and that reach it."""
    backwards: Graph = {}
    for node, others in graph.items():
        for other in others:
            backwards.setdefault(other, set()).add(node)
    return _reached(start, graph) & _reached(start, backwards)


def _reached(start: str, graph: Graph) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        new = graph.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def all_circles(root: Path = ROOT, packages: tuple[str, ...] = PACKAGES) -> list[list[str]]:
    """Circles between files and between the children of any package."""
    graph = files(root, packages)
    found = circles(graph)
    for siblings in children(graph).values():
        found += [circle for circle in circles(siblings) if circle not in found]
    return found


def main() -> int:
    graph = files()
    print(f"{len(graph)} files, {sum(map(len, graph.values()))} imports between them")
    found = all_circles()
    for circle in found:
        print(f"circle of {len(circle)}: {', '.join(circle)}")
        for one in circle:
            inside = [
                f"{a} -> {b}"
                for a in graph
                for b in graph[a]
                if a.startswith(one)
                for two in circle
                if two != one and (b + ".").startswith(two + ".") and (a + ".").startswith(one + ".")
            ]
            for line in sorted(inside)[:20]:
                print(f"    {line}")
    print(f"{len(found)} circles")
    return min(len(found), 99)


if __name__ == "__main__":
    sys.exit(main())

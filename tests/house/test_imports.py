"""Files and folders import each other in one direction only, and tests import only names that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.house.imports import ROOT, all_circles, modules, nodes, together

pytestmark = together


def test_there_are_no_import_circles() -> None:
    assert all_circles() == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.py": "import box.b", "b.py": ""}, []),
        ({"a.py": "from box import b", "b.py": "def f():\n    from box.a import x"}, [["box.a", "box.b"]]),
        (
            {"a.py": "from . import b", "b.py": "from .c import x", "c.py": "import box.a.y"},
            [["box.a", "box.b", "box.c"]],
        ),
        ({"p/x.py": "import box.q.x", "q/y.py": "import box.p.y", "p/y.py": "", "q/x.py": ""}, [["box.p", "box.q"]]),
        (
            {"__init__.py": "", "p/__init__.py": "from box.p.x import f", "p/x.py": "from box.y import f", "y.py": ""},
            [],
        ),
    ],
)
def test_circles_are_found_wherever_an_import_stands(tmp_path: Path, files: dict[str, str], expected: list) -> None:
    for name, text in files.items():
        (tmp_path / "box" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "box" / name).write_text(text)
    assert all_circles(tmp_path, ("box",)) == expected


STATEMENT = re.compile(r"^[ \t]*(from (\w+)[\w.]* import (?:\([^)]*\)|[^(\n]+))", re.MULTILINE)
"""An import of names, on any line of a file: of tests these alone are parsed, in a tenth of the time."""


def missing_names(root: Path, folders: tuple[str, ...], packages: tuple[str, ...]) -> list[str]:
    """What files of `folders` import from modules of `packages` and is not there, as `file: module.name`."""
    known = modules(root, packages)
    found = []
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        statements = [one[1] for one in STATEMENT.finditer(file.read_text()) if one[2] in packages]
        for node in ast.parse("\n".join(statements)).body:
            assert isinstance(node, ast.ImportFrom)
            names = names_in(known[node.module]) if node.module in known else frozenset()
            asked = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in known} - {"*"}
            found += [f"{file.relative_to(root)}: {node.module}.{name}" for name in sorted(asked - names)]
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names that a file defines, assigns or imports, at any depth."""
    found: set[str] = set()
    for node in nodes(path.read_text()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)


def test_names_that_tests_and_benches_import_of_the_product_are_there() -> None:
    """Imports within functions of a bench are seen by no checker until somebody measures with it again."""
    assert missing_names(ROOT, ("tests", "docs", "examples"), ("coordinator", "facility")) == []


def test_a_name_that_has_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "__init__.py").write_text("")
    (tmp_path / "box" / "a.py").write_text("import os\nB = 1\ndef c(): ...\n")
    (tmp_path / "bench").mkdir()
    text = "def f():\n    from box.a import B, c, gone, os\n"
    text += "    from box import (\n        a,\n        b,  # gone, too\n    )\n"
    (tmp_path / "bench" / "x.py").write_text(text)
    assert missing_names(tmp_path, ("bench",), ("box",)) == ["bench/x.py: box.a.gone", "bench/x.py: box.b"]

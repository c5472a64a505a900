"""The table of holes in the threat model names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.imports import parsed

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "threat-model.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_hole_has_a_test():
    text = PAGE.read_text().partition("## Holes that were found")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for row in rows:
        named = NAMED.findall(row)
        assert named, row
        for file, name in named:
            tree = parsed((ROOT / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"

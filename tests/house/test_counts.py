"""What a person reads says `1 node` or `2 nodes` (`facility.exchange.text.number_of`), and never `node(s)`."""

from __future__ import annotations

import ast
import re

from tests.conftest import ROOT
from tests.house.imports import nodes, together

pytestmark = together

EITHER = re.compile(r"[a-z]\((s|es|ies)\)")


def test_no_message_leaves_the_number_to_its_reader():
    python = {}
    for room in ("coordinator", "facility"):
        for file in (ROOT / room).rglob("*.py"):
            if EITHER.search(text := file.read_text(encoding="utf-8")):
                said = [one for one in nodes(text) if isinstance(one, ast.Constant)]
                if lines := [one.lineno for one in said if EITHER.search(str(one.value))]:
                    python[str(file.relative_to(ROOT))] = lines
    assert python == {}
    shell = [file for room in ("coordinator", "facility", "templates") for file in (ROOT / room).rglob("*.sh")]
    assert shell and [file.name for file in shell if EITHER.search(file.read_text(encoding="utf-8"))] == []

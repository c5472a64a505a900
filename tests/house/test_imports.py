"""Files and folders import each other in one direction only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.imports import all_circles, together

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

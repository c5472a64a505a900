"""Laws about who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imports(path: Path) -> set[str]:
    """Absolute module names that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names.add(stem)
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def test_facility_never_imports_coordinator():
    for path in (ROOT / "facility").rglob("*.py"):
        assert not any(name.split(".")[0] == "coordinator" for name in imports(path)), path


def test_coordinator_imports_only_the_exchange_of_facility():
    for path in (ROOT / "coordinator").rglob("*.py"):
        for name in imports(path):
            if name.split(".")[0] == "facility":
                assert name in ("facility.exchange", "facility.__version__", "facility") or name.startswith(
                    "facility.exchange."
                ), (path, name)
                if name == "facility":
                    assert not any(
                        n.startswith("facility.") and not n.startswith(("facility.exchange", "facility.__version__"))
                        for n in imports(path)
                    )


@pytest.mark.parametrize(
    "module",
    [
        "facility.exchange.messages.manifest",
        "facility.exchange.checkpoints.checkpoint",
        "facility.exchange.messages.settings",
    ],
)
def test_exchange_imports_no_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

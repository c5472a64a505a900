"""Laws about who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.house.imports import imported_names, modules, parsed, together

pytestmark = together

ROOT = Path(__file__).resolve().parents[2]


def test_facility_never_imports_coordinator():
    for path in (ROOT / "facility").rglob("*.py"):
        assert not any(name.split(".")[0] == "coordinator" for name in imported_names(path)), path


def test_coordinator_imports_only_the_exchange_of_facility():
    for path in (ROOT / "coordinator").rglob("*.py"):
        for name in imported_names(path):
            if name.split(".")[0] == "facility":
                assert name in ("facility.exchange", "facility.__version__", "facility") or name.startswith(
                    "facility.exchange."
                ), (path, name)
                if name == "facility":
                    assert not any(
                        n.startswith("facility.") and not n.startswith(("facility.exchange", "facility.__version__"))
                        for n in imported_names(path)
                    )


WITHOUT_TORCH = ("facility.exchange", "coordinator.problem", "coordinator.planning", "coordinator.simulation")
"""Packages that load neither torch nor transformers as they are imported; functions of `facility.exchange` may."""


def loaded(node: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports as it is imported itself: not in functions, and not for type checking."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
        ):
            yield from loaded(child)


def chain_to_torch(module: str, direct: Mapping[str, set[str]]) -> list[str]:
    """A chain of imports from `module` to torch or transformers; [] where none leads there."""
    chains, seen = [[module]], {module}
    while chains:
        chain = chains.pop()
        for name in sorted(direct[chain[-1]]):
            if name.partition(".")[0] in ("torch", "transformers"):
                return [*chain, name]
            parts = name.split(".")  # a module's packages are imported before it
            new = {".".join(parts[:count]) for count in range(1, len(parts) + 1)} & direct.keys() - seen
            seen |= new
            chains += [[*chain, one] for one in sorted(new)]
    return []


def test_what_both_sides_share_and_the_planners_load_no_torch():
    direct = {name: set(loaded(parsed(path.read_text()))) for name, path in modules().items()}
    checked = [name for name in direct if name.startswith(WITHOUT_TORCH)]
    assert len(checked) > 150
    assert [chain for name in checked if (chain := chain_to_torch(name, direct))] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch.nn", ["a", "torch.nn"]),
        ("from b import c", ["a", "b", "transformers.x"]),
        ("def f():\n    import torch", []),
        ("if TYPE_CHECKING:\n    import torch", []),
        ("class A:\n    try:\n        import torch\n    except ImportError: ...", ["a", "torch"]),
    ],
)
def test_a_chain_to_torch_is_found_as_modules_load(text: str, expected: list[str]):
    direct = {"a": set(loaded(ast.parse(text))), "b": {"transformers.x"}}
    assert chain_to_torch("a", direct) == expected

"""Nothing that comes from elsewhere can be executed: the product's code has no way to do so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.imports import nodes, together

pytestmark = together

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for top in ("facility", "coordinator") for path in (ROOT / top).rglob("*.py"))
CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "unsafe_load",
    "full_load",
}
"""Collectives of torch that unpickle what a peer sends, and YAML loaders that make any object."""
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
OPTIONS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def findings(text: str) -> list[str]:
    """What a module does that could execute data."""
    found = []
    for node in nodes(text):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [f"line {node.lineno}: imports {name}" for name in names if name.partition(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            plain = isinstance(node.func, ast.Name)
            if name in CALLS or (plain and name in ("eval", "exec")):
                found.append(f"line {node.lineno}: calls {name}")
            for option in node.keywords:
                value = option.value.value if isinstance(option.value, ast.Constant) else None
                if option.arg in OPTIONS and value is OPTIONS[option.arg]:
                    found.append(f"line {node.lineno}: {name}({option.arg}={value})")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "dist.all_gather_object(a, b)",
        "eval(x)",
        "subprocess.run(x, shell=True)",
        "numpy.load(x, allow_pickle=True)",
        "torch.load(x, weights_only=False)",
    ],
)
def test_each_way_to_execute_data_is_found(text: str):
    assert findings(text)


def test_no_module_has_one():
    told = {str(path.relative_to(ROOT)): found for path in FILES if (found := findings(path.read_text()))}
    assert len(FILES) > 300 and told == {}

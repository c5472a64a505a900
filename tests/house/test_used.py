"""The product holds no code that only tests or benches run: it is moved to `tests/reproductions/`, or removed. Nor do
the tests hold a module that nothing runs.

By names: used is what a file runs when it is imported, what CWL, templates, set-up scripts and the generator of the
documentation name, and what a used function or class mentions, in code or in a string. A method counts with its class.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.house.imports import nodes, parsed, together

pytestmark = together

WORD = re.compile(r"[A-Za-z_]\w*")
CALLERS = (
    "pyproject.toml",
    "Makefile",
    "cwl/**/*.cwl",
    "templates/*.sh",
    "facility/**/*.sh",
    "coordinator/*.sh",
    "docs/*.py",
)
"""Files beside the product that name what they run of it."""
FOR_USERS = {
    "facility/contract.py": "a trainer of one's own imports it (docs/how-to/own-trainer.md, examples/)",
}
BY_REGISTRY = ("CODEC", "DECLARATION", "SCHEDULER", "__all__")
"""Constants that a registry, or Python, reads by their name."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def mentioned(node: ast.AST) -> Iterator[str]:
    """Names that code mentions; docstrings and what is defined under a name do not count."""
    inside = list(ast.walk(node))
    documentation = {id(child.value) for child in inside if isinstance(child, ast.Expr)}
    for child in inside:
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and id(child) not in documentation:
            yield from WORD.findall(child.value)


def unused(root: Path, folders: Sequence[str] = ("",), callers: str = "") -> list[str]:
    """Top-level functions and classes of folders of `root` that nothing used mentions, as `file:name`."""
    inside: dict[str, set[str]] = defaultdict(set)
    defined: dict[str, list[str]] = defaultdict(list)
    used = set(WORD.findall(callers))
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        name_of = str(file.relative_to(root))
        for statement in parsed(file.read_text()).body:
            if not isinstance(statement, Definition):
                used.update(mentioned(statement))
                continue
            used.update(name for decorator in statement.decorator_list for name in mentioned(decorator))
            inside[statement.name].update(mentioned(statement))
            if statement.decorator_list and not isinstance(statement, ast.ClassDef) and _registers(statement):
                used.add(statement.name)
            defined[statement.name].append(name_of)
    todo = list(used)
    while todo:
        new = inside.get(todo.pop(), set()) - used
        used |= new
        todo += new
    return sorted(f"{file}:{name}" for name, files in defined.items() if name not in used for file in files)


def _registers(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a decorator with arguments takes the function, as a command line's `@app.command(...)` does."""
    return any(isinstance(decorator, ast.Call) for decorator in function.decorator_list)


def unread(root: Path, folders: Sequence[str] = ("",)) -> list[str]:
    """Constants of the files of `folders` that neither their file reads nor another imports, as `file:name`."""
    imported: set[tuple[str, str]] = set()
    attributes: set[str] = set()
    assigned: list[tuple[str, str, str]] = []
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        name_of, text = str(file.relative_to(root)), file.read_text()
        own: set[str] = set()
        for node in nodes(text):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                own.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                imported.update((node.module or "", alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                attributes.add(f"{node.value.id}.{node.attr}")
        module = name_of.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        targets = [target for node in parsed(text).body for target in _targets(node)]
        assigned += [(name_of, module, name) for name in targets if name not in own]
    return [
        f"{file}:{name}"
        for file, module, name in assigned
        if (module, name) not in imported and f"{module.rpartition('.')[2]}.{name}" not in attributes
    ]


def _targets(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement assigns."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name):
                yield node.id


def test_the_product_runs_all_it_holds():
    callers = "\n".join(file.read_text() for pattern in CALLERS for file in sorted(ROOT.glob(pattern)))
    found = unused(ROOT, ("coordinator", "facility"), callers)
    assert [one for one in found if one.partition(":")[0] not in FOR_USERS] == []


def test_the_product_reads_every_constant_that_it_declares():
    found = [one for one in unread(ROOT, ("coordinator", "facility")) if one.partition(":")[2] not in BY_REGISTRY]
    assert found == []


def unnamed(root: Path, pages: Iterable[Path] = ()) -> list[str]:
    """Modules of the tests that pytest does not collect and no other file names, nor one of `pages`: nothing runs
    them."""
    files = {path: path.read_text() for path in [*root.rglob("*.py"), *root.rglob("*.md"), *pages]}
    naming: dict[str, set[Path]] = defaultdict(set)
    for path, text in files.items():
        for word in WORD.findall(text):
            naming[word].add(path)
    helpers = [path for path in files if path.suffix == ".py" and not re.match("test_|conftest|__", path.name)]
    return sorted(str(path.relative_to(root)) for path in helpers if not naming[path.stem] - {path})


def test_every_module_of_the_tests_is_named_by_another():
    assert unnamed(ROOT / "tests", ROOT.glob("docs/**/*.md")) == []


def test_a_module_that_only_itself_names_is_found(tmp_path: Path):
    (tmp_path / "left.py").write_text("'left'")
    (tmp_path / "used.py").write_text("")
    (tmp_path / "test_a.py").write_text("import used")
    assert unnamed(tmp_path) == ["left.py"]


def test_a_constant_is_read_by_its_own_file_or_by_an_import(tmp_path: Path):
    (tmp_path / "a.py").write_text("A = B = C = D = 1\nprint(A)\n")
    (tmp_path / "b.py").write_text("import a\nfrom a import B\nfrom z import D\nE: int = a.C\n")
    assert unread(tmp_path) == ["a.py:D", "b.py:E"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): ...\nf()", []),
        ("def f(): f()", ["a.py:f"]),
        ("def f(): g()\ndef g(): f()", ["a.py:f", "a.py:g"]),
        ("def f(): 'g'\ndef g(): ...\nf()", ["a.py:g"]),
        ("def f(): return 'g'\ndef g(): ...\nf()", []),
        ("@app.command()\ndef f(): ...", []),
        ("class A:\n    def m(self): g()\ndef g(): ...\nA()", []),
    ],
)
def test_what_only_itself_mentions_is_unused(tmp_path: Path, text: str, expected: list[str]):
    (tmp_path / "a.py").write_text(text)
    assert unused(tmp_path) == expected

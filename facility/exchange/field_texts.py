"""The text under each field of a dataclass, read from the source when documentation asks for it.

Steps of a workflow start many short processes, none of which shows these texts; reading them while classes are made
took a fifth of such a process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Mapping


def field_texts(kind: type) -> Mapping[str, str]:
    """By field, of the class itself and not of those that it extends."""
    module = sys.modules.get(kind.__module__)
    try:
        return _texts_by_class(inspect.getsource(module)).get(kind.__qualname__, {}) if module is not None else {}
    except (OSError, TypeError):  # without source there are no texts
        return {}


def field_text(kind: type, name: str) -> str:
    """The text below a field, in the class or in the first that it extends which has one; empty: none.

    A field that is made by code, without a line in the source, has its text in pydantic's description.
    """
    for one in kind.__mro__:
        made = one.__dict__.get("__pydantic_fields__", {}).get(name)
        if text := field_texts(one).get(name) or (made.description if made is not None else ""):
            return str(text)
    return ""


@functools.cache
def _texts_by_class(source: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}

    def visit(body: list[ast.stmt], outer: str) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                found[f"{outer}{statement.name}"] = _texts(statement)
                visit(statement.body, f"{outer}{statement.name}.")
            elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(statement.body, f"{outer}{statement.name}.<locals>.")
            elif isinstance(statement, ast.If):
                visit([*statement.body, *statement.orelse], outer)

    visit(ast.parse(source).body, "")
    return found


def _texts(kind: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for field, after in itertools.pairwise(kind.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
        ):
            texts[field.target.id] = inspect.cleandoc(after.value.value)
    return texts

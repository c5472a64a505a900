"""What a group of tests shares is made once: no test outside of the group asks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest


def made_twice(items: Iterable[Any]) -> list[str]:
    """Fixtures of a module of tests or wider that tests of an xdist group use, and others too, with one test of each:
    each process makes them anew."""
    users: dict[tuple[str, str], dict[str | None, str]] = defaultdict(dict)
    for item in items:
        group = item.get_closest_marker("xdist_group")
        for name, definitions in item._fixtureinfo.name2fixturedefs.items():
            if definitions[-1].scope != "function" and definitions[-1].baseid:  # pytest's own have none
                users[definitions[-1].baseid, name].setdefault(group and group.args[0], item.nodeid)
    return [f"{name}: {'; '.join(by.values())}" for (_, name), by in users.items() if len(by) > 1 and any(by)]


def test_what_a_group_shares_is_asked_for_by_its_tests_alone(request: pytest.FixtureRequest):
    """A federation of eight seconds ran twice, for the first law on it was of no group."""
    assert made_twice(request.session.items) == []


@pytest.mark.parametrize(
    ("groups", "scope", "baseid", "found"),
    [
        (["a run", "a run"], "module", "tests/a.py", []),
        ([None, "a run"], "module", "tests/a.py", ["run: 0; 1"]),
        (["another", "a run"], "session", "tests", ["run: 0; 1"]),
        ([None, None], "module", "tests/a.py", []),
        ([None, "a run"], "function", "tests/a.py", []),
        ([None, "a run"], "session", "", []),
    ],
)
def test_a_test_that_was_forgotten_is_named(groups: list[str | None], scope: str, baseid: str, found: list[str]):
    fixture = {"run": [SimpleNamespace(scope=scope, baseid=baseid)]}
    marks = [group and pytest.mark.xdist_group(group).mark for group in groups]
    items = [
        SimpleNamespace(
            nodeid=str(number),
            get_closest_marker=lambda _, mark=mark: mark,
            _fixtureinfo=SimpleNamespace(name2fixturedefs=fixture),
        )
        for number, mark in enumerate(marks)
    ]
    assert made_twice(items) == found

"""Law: each family of the pinned transformers ends as docs/reference/families.md says, in every layout.

    make nightly NIGHTLY=tests/training/test_every_family.py

One test a family, so that workers share them. What this very code was found to do is kept in the file that
CROSSFED_FAMILIES names (`make nightly` names one in build/): a sweep that was stopped goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.training.family_page import COLUMNS, TITLES, Row, lines_of, table_line, untried_of
from tests.training.family_table import PAGE, SILENT, Trial, enough, keep, rows_of, trials
from tests.training.family_trial import families

WRITTEN = PAGE.read_text()
NAMES = [(task, family) for task in TITLES for family in sorted({*lines_of(WRITTEN, task), *untried_of(WRITTEN, task)})]


@pytest.mark.skipif(
    f"transformers=={version('transformers')}\n" not in (ROOT / "constraints.txt").read_text(),
    reason="the page is of another version of transformers than is installed",
)
@pytest.mark.parametrize("task", list(TITLES))
def test_the_page_names_every_family_of_the_pinned_transformers(task: str):
    assert [family for own, family in NAMES if own == task] == families(task)


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    with trials() as found:
        yield found


def row_of(trial: Trial, task: str, family: str) -> Row:
    """The row of a family: found earlier by this code, or now. One that a busy machine kept waiting is tried again."""
    kept = Path(os.environ["CROSSFED_FAMILIES"]) if os.environ.get("CROSSFED_FAMILIES") else None
    if kept is not None:
        known = {(row["task"], row["family"]): row for row in rows_of(kept)}.get((task, family))
        if known is not None and enough(known, layouts=True) and not wrong(known):
            return known
    row = trial(task, family, layouts=True)
    if any(SILENT in row[name][1] for name in COLUMNS if name in row):
        row = trial(task, family, layouts=True)
    if kept is not None:
        keep(row, kept)
    return row


def wrong(row: Row) -> list[str]:
    return [f"{name}: {row[name][1]}" for name in COLUMNS if name in row and row[name][0] == "wrong"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("task", "family"), NAMES)
def test_a_family_is_as_the_documentation_says(trial: Trial, task: str, family: str):
    """It ends in no traceback and no wrong result, and the page tells what comes of it now, and why."""
    row = row_of(trial, task, family)
    assert wrong(row) == []
    if row["one"][0] == "needs":
        assert family in untried_of(WRITTEN, task), row
    else:
        assert table_line(row) == lines_of(WRITTEN, task).get(family), row

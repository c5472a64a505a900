"""A table of rounds for a terminal that is narrower than it: whole names and numbers in fewer columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coordinator.archive.table import table

TEXTS = ("facility", "status")
"""Columns whose cells may go over several lines."""
LEAST = 16
"""Characters that each of them has before another column is left out; fewer where its longest cell is shorter."""
BORDER = 3
"""Characters around a cell, with the line beside it."""


def fitted(whole: Table, width: int) -> tuple[Table, list[str]]:
    """The table as it fits into `width` characters, and the headers of the columns that were left out.

    A table that fits already is returned as it is. Of another, facilities and what is said of them take more lines, and
    then columns are left out, the one that says least first; what is shown is shown whole.
    """
    columns = list(whole.columns)
    if _needed(columns, {one: _longest(_column(columns, one)) for one in TEXTS}) <= width:
        return whole, []
    least = {one: min(_longest(_column(columns, one)), LEAST) for one in TEXTS}
    left_out = []
    for column in _least_telling_first(columns):
        if _needed(columns, least) <= width:
            break
        columns.remove(column)
        left_out.append(str(column.header))
    result = Table(title=whole.title, title_justify="left")
    room = width - _needed(columns, dict.fromkeys(TEXTS, 0))
    wanted = {one: _longest(_column(columns, one)) for one in TEXTS}
    for column in columns:
        if (header := str(column.header)) in TEXTS:
            other = wanted[TEXTS[1 - TEXTS.index(header)]]
            share = max(1, min(wanted[header], max(room // 2, room - other)))
            result.add_column(header, overflow="fold", width=share)
        else:
            result.add_column(_over_lines(header), justify=column.justify, no_wrap=True)
    for row, *cells in zip(whole.rows, *(column.cells for column in columns), strict=True):
        result.add_row(*cells, end_section=row.end_section)
    return result, left_out


def print_rounds(console: Console, data: dict[str, Any]) -> None:
    """Print the table of `summary`'s data as it fits, and which columns are not shown; nothing where no round is."""
    if not data["rounds"]:
        return
    shown, left_out = fitted(table(data), console.width)
    console.print(shown)
    if left_out:
        names = ", ".join(left_out)
        console.print(f"not shown, since {console.width} characters are too few: {names} (crossfed status --json)")


def _column(columns: Sequence[Column], header: str) -> Column:
    return next(one for one in columns if one.header == header)


def _least_telling_first(columns: Sequence[Column]) -> list[Column]:
    """All that may be left out: neither rounds nor facilities nor what is said of them."""
    amount = str(columns[columns.index(_column(columns, "status")) + 1].header)  # tokens, or what else was trained on
    before = ("weight", "seconds", amount, "staleness", "accuracy received", " received", "accuracy returned")
    order = (*before, " returned", "global model")
    found: list[Column] = []
    for ending in order:
        found += [one for one in columns if str(one.header).endswith(ending) and one not in found]
    return found


def _needed(columns: Sequence[Column], texts: dict[str, int]) -> int:
    """Width of a table of these columns. `texts`: that of each of `TEXTS`."""
    inner = [texts[str(one.header)] if one.header in TEXTS else _longest(one) for one in columns]
    return sum(inner) + BORDER * len(columns) + 1


def _longest(column: Column) -> int:
    """Characters of its longest cell, or of the longest line of its header."""
    cells = [Text.from_markup(str(cell)).cell_len for cell in column.cells]
    return max([len(word) for word in str(column.header).split()] + cells)


def _over_lines(header: str) -> str:
    return header.replace(" ", "\n")

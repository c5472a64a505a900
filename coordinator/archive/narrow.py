"""A table for a terminal that is narrower than it: whole names and numbers in fewer columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Column, Table
from rich.text import Text

from coordinator.archive.table import table

TEXTS = ("facility", "status")
"""Columns of a table of rounds whose cells may go over several lines."""
LEAST = 16
"""Characters that each of them has at most before another column is left out."""
LINES = 6
"""Over so many lines a cell may go before another column is left out, unless its column has `LEAST` characters."""
BORDER = 3
"""Characters around a cell, with the line beside it."""


def fitted(
    whole: Table, width: int, texts: Sequence[str] = TEXTS, order: Sequence[str] = ()
) -> tuple[Table, list[str]]:
    """The table as it fits into `width` characters, and the headers of the columns that were left out.

    A table that fits already is returned as it is. Of another, the cells of the columns in `texts` (facilities, and
    what is said of them) take more lines, and then columns are left out, the one that says least first; what is shown
    is shown whole. `order`: headers of those that may be left out; of a table of rounds, it is known.
    """
    columns = list(whole.columns)
    texts = [str(one.header) for one in columns if str(one.header) in texts]
    wanted = {one: _longest(_column(columns, one)) for one in texts}
    if _needed(columns, wanted) <= width:
        return whole, []
    least = {one: _least(_column(columns, one)) for one in texts}
    left_out = []
    leaving = [one for header in order for one in columns if one.header == header] or _least_needed_first(columns)
    for column in leaving:
        if _needed(columns, least) <= width:
            break
        columns.remove(column)
        left_out.append(" ".join(str(column.header).split()))
    least = {str(one.header): least[str(one.header)] for one in columns if one.header in least}
    share = _shares(width - _needed(columns, dict.fromkeys(least, 0)), least, wanted)
    result = Table(title=whole.title, title_justify="left")
    for column in columns:
        header = str(column.header)
        if header in share:
            result.add_column(header, justify=column.justify, overflow="fold", width=share[header])
        else:
            result.add_column(_over_lines(header), justify=column.justify, no_wrap=True)
    shown = [list(whole.columns).index(one) for one in columns]
    cells = [list(one.cells) for one in whole.columns]
    for at, row in enumerate(whole.rows):
        result.add_row(*(cells[column][at] for column in shown), end_section=row.end_section)
    return result, left_out


class Fitted:
    """A table that is made to fit whichever console it is shown on, each time; as `fitted`."""

    def __init__(self, whole: Table, texts: Sequence[str], order: Sequence[str]) -> None:
        self._whole, self._texts, self._order = whole, texts, order

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, left_out = fitted(self._whole, options.max_width, self._texts, self._order)
        yield shown
        if left_out:
            yield Text(f"too narrow to show: {', '.join(left_out)}", style="dim italic")


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


def _least_needed_first(columns: Sequence[Column]) -> list[Column]:
    """All that may be left out: neither rounds nor facilities nor what is said of them."""
    amount = str(columns[columns.index(_column(columns, "status")) + 1].header)  # tokens, or what else was trained on
    before = ("weight", "seconds", amount, "staleness", "accuracy received", " received", "accuracy returned")
    order = (*before, " returned", "global model")
    found: list[Column] = []
    for ending in order:
        found += [one for one in columns if str(one.header).endswith(ending) and one not in found]
    return found


def _needed(columns: Sequence[Column], texts: dict[str, int]) -> int:
    """Width of a table of these columns. `texts`: that of each column of text."""
    inner = [texts[str(one.header)] if one.header in texts else _longest(one) for one in columns]
    return sum(inner) + BORDER * len(columns) + 1


def _least(column: Column) -> int:
    """Characters that a column of text has before another column is left out: its longest word, `LINES` lines."""
    words = [len(word) for cell in (column.header, *column.cells) for word in _text(cell).plain.split()]
    return min(LEAST, max([*words, -(-_longest(column) // LINES)]))


def _shares(room: int, least: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """The width of each column of text: at least `least`, where there is room for that, and no more than `wanted`."""
    shares = least if sum(least.values()) <= room else dict.fromkeys(least, 1)
    spare = max(0, room - sum(shares.values()))
    result = {}
    for left, one in enumerate(sorted(least, key=lambda one: wanted[one] - shares[one])):
        more = min(wanted[one] - shares[one], spare // (len(least) - left))
        result[one], spare = shares[one] + more, spare - more
    return result


def _longest(column: Column) -> int:
    """Characters of its longest cell, or of the longest line of its header."""
    return max([len(word) for word in str(column.header).split()] + [_text(cell).cell_len for cell in column.cells])


def _text(cell: object) -> Text:
    return Text.from_markup(str(cell))


def _over_lines(header: str) -> str:
    return "\n".join(header.split())

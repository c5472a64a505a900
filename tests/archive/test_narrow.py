"""Names and numbers are whole in a terminal of any width: `crossfed status` at 60 columns cut names to two letters."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from coordinator.archive.narrow import fitted, print_rounds
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.table import table
from tests.archive.test_many_facilities import row

WIDTHS = (40, 60, 80, 120, 200)
LONG = "a-national-supercomputing-centre-of-some-country-accelerated"


def federation(count: int) -> dict[str, Any]:
    """A round in which the second facility is absent, and every other one has a long name."""
    rows = [row(number) | {"facility": f"{LONG if number % 2 else 's'}-{number}"} for number in range(count)]
    rows[1] |= {"status": "absent", "reason": "the job ran out of memory"}
    one = {"round": 12, "facilities": rows, "global_perplexity": 1234.567}
    return {"rounds": [one], "final_evaluation": [], "task": ""}


def printed(data: dict[str, Any], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, emoji=False)
    print_rounds(console, data)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def column(text: str, number: int) -> str:
    """What one column says, its lines put together."""
    lines = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    return "".join(cells[number + 1].strip() for cells in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 20, 200])
def test_no_name_and_no_number_is_cut(count: int, width: int):
    text = printed(federation(count), width)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert f"{LONG}-1" in column(text, 1), "a name goes on in the next line"
    assert "outofmemory" in column(text, 2).replace(" ", "") and "12" in column(text, 0)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_left_out_is_named_and_what_tells_least_goes_first(width: int):
    text = printed(federation(2), width)
    _, left_out = fitted(table(federation(2)), width)
    whole = ["weight", "seconds", "tokens", "perplexity received", "perplexity returned", "global model"]
    assert left_out == whole[: len(left_out)]
    assert ("not shown, since" in text) == bool(left_out)
    assert all(name in " ".join(text.split()) for name in left_out)
    assert ("1234.567" in text) == ("global model" not in left_out)


def test_before_the_first_round_no_table_is_printed():
    """A run that ended before had the head of an empty one among its last words."""
    assert printed({"rounds": [], "final_evaluation": [], "task": ""}, 80) == ""


def test_a_table_that_fits_is_left_as_it_is():
    short = table({"rounds": [], "final_evaluation": [], "task": ""})
    assert fitted(short, 120) == (short, [])
    assert [len(fitted(table(federation(2)), width)[1]) for width in WIDTHS] == sorted(
        (len(fitted(table(federation(2)), width)[1]) for width in WIDTHS), reverse=True
    )


def test_rounds_that_were_missed_by_equal_shares_have_one_share():
    rounds = [{"round": number, "present": share, "facilities": []} for number, share in enumerate((0.5, 0.5, 1.0))]
    assert summary_remarks({"rounds": rounds}) == [
        "rounds that facilities missed: 2, at 0.50 of the server learning rate"
    ]
    rounds[1]["present"] = 0.75
    assert summary_remarks({"rounds": rounds}) == [
        "rounds that facilities missed: 2, at 0.50 to 0.75 of the server learning rate"
    ]

"""A table of rounds and facilities, of the data of `coordinator.archive.summary`; many facilities have one line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from coordinator.archive.many import first_groups, group_for_display, kind_of, names_of, too_many_to_list
from coordinator.archive.rounds import CARRIED
from coordinator.shown_text import safe_line
from facility.exchange.task_words import TEXT, TaskWords, words_of

MEDIANS = ("perplexity_received", "perplexity_returned", "accuracy_received", "accuracy_returned")
"""Figures of which one row for several facilities has the median."""
FINAL = ("facility", "status", "seconds", "received", "accuracy_received", "accuracy_returned")
"""Cells of the final evaluation, which trains nothing."""


def table(data: dict[str, Any]) -> Table:
    """A rich table of `summary`'s data; with a column for staleness where an update came late."""
    words = words_of(data.get("task", ""))
    columns = {
        "round": "round",
        "facility": "facility",
        "status": "status",
        "amount": words.unit,
        "seconds": "seconds",
        "weight": "weight",
        **({"staleness": "staleness"} if any_late(data) else {}),
        "received": f"{words.metric} received",
        "returned": f"{words.metric} returned",
        "made": "global model",
    }
    if has_accuracy(data):
        columns |= {"accuracy_received": "accuracy received", "accuracy_returned": "accuracy returned"}
    result = Table(title="rounds and facilities", title_justify="left")
    for header in columns.values():
        result.add_column(header, justify="left" if header in ("facility", "status") else "right")

    def add(cells: Mapping[str, str], *, end_section: bool = False) -> None:
        result.add_row(*(cells.get(key, "") for key in columns), end_section=end_section)

    for entry in data["rounds"]:
        lines = _lines(entry["facilities"], words)
        for place, cells in enumerate(lines, 1):
            first = {"round": str(entry["round"])} if place == 1 else {}
            last = {"made": words.text(entry["global_perplexity"])} if place == len(lines) else {}
            add(first | cells | last, end_section=bool(last))
    for cells in _lines(data["final_evaluation"], words):
        add({"round": "final"} | {key: cells[key] for key in FINAL})
    return result


def _lines(rows: Sequence[dict[str, Any]], words: TaskWords) -> list[dict[str, str]]:
    """The cells of each line that is shown of facilities, by column."""
    alone, together = to_show(rows)
    return [*([_cells_of_many(together, words)] if together else []), *(_cells(row, words) for row in alone)]


def _cells(row: dict[str, Any], words: TaskWords) -> dict[str, str]:
    received, returned = format_accuracies(row)
    return {
        "facility": row["facility"],
        "status": _status(row),
        "amount": f"{words.count(row):,}",
        "seconds": seconds_of(row["seconds"]),
        "weight": f"{row['weight']:.3f}",
        "staleness": str(row.get("staleness", 0)),
        "received": words.text(row["perplexity_received"]),
        "returned": words.text(row["perplexity_returned"]),
        "accuracy_received": received,
        "accuracy_returned": returned,
    }


def _cells_of_many(rows: Sequence[dict[str, Any]], words: TaskWords) -> dict[str, str]:
    """One line for facilities that are all well: sums of what was trained on and of weights, medians of the rest."""
    return {
        "facility": f"{len(rows)} facilities",
        "status": "ok (medians)",
        "amount": f"{sum(map(words.count, rows)):,}",
        "seconds": seconds_of(median_of(rows, "seconds") or 0.0),
        "weight": f"{sum(row['weight'] for row in rows):.3f}",
        "staleness": "0",
        "received": words.text(median_of(rows, "perplexity_received")),
        "returned": words.text(median_of(rows, "perplexity_returned")),
        "accuracy_received": plain_number(median_of(rows, "accuracy_received")),
        "accuracy_returned": plain_number(median_of(rows, "accuracy_returned")),
    }


def any_late(data: Mapping[str, Any]) -> bool:
    """Whether some update came in a later round than it was made for."""
    return any(row.get("staleness") for entry in data["rounds"] for row in entry["facilities"])


def has_accuracy(data: Mapping[str, Any]) -> bool:
    """True if most facilities that evaluated reported an accuracy: a single facility does not decide it."""
    rows = [row for entry in data["rounds"] for row in entry["facilities"]] + data["final_evaluation"]
    reported = [row.get("accuracy_received") is not None for row in rows if row.get("perplexity_received") is not None]
    return 2 * sum(reported) > len(reported)


def format_accuracies(row: Mapping[str, Any]) -> list[str]:
    """Accuracies of the received and the returned model, as text."""
    return [plain_number(row.get("accuracy_received")), plain_number(row.get("accuracy_returned"))]


def to_show(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that are shown one by one, and those that one line stands for: of many facilities only those that failed,
    came late or have a note are shown by name, and of many of these one row for all to which the same happened."""
    if not too_many_to_list(rows):
        return list(rows), []
    odd = [row for row in rows if row["status"] != "ok" or note_of(row) or row.get("staleness")]
    sound = [row for row in rows if row["status"] == "ok" and not note_of(row) and not row.get("staleness")]
    shown_groups, rest = first_groups(group_for_display(odd, _what_happened))
    merged = [one_of(group) for group in shown_groups]
    if rest:
        merged.append(one_of(rest) | {"status": "other", "reason": "for other reasons: `crossfed status --json`"})
    return merged, sound


def _what_happened(row: Mapping[str, Any]) -> tuple[object, ...]:
    kinds = (kind_of(text, row["facility"]) for text in (str(row.get("reason") or ""), note_of(row)))
    return row["status"], row.get("staleness", 0), *kinds


def one_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for several: the first one's words, sums of what was trained on and of weights, medians of the rest."""
    if len(rows) == 1:
        return rows[0]
    sums = {key: sum(row[key] for row in rows) for key in ("tokens", "weight")}
    sums["samples"] = sum(row.get("samples", 0) for row in rows)
    speeds = {key: median_of(rows, key) or 0.0 for key in ("seconds", "tokens_per_second")}
    medians = {key: median_of(rows, key) for key in MEDIANS}
    return rows[0] | sums | speeds | medians | {"facility": names_of([row["facility"] for row in rows])}


def median_of(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Median of the figure `key` over the rows that have it; None where none has."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return statistics.median(known) if known else None


def seconds_of(seconds: float) -> str:
    """Empty where a job reported none: a job never takes zero seconds."""
    return f"{seconds:.1f}" if seconds else ""


def plain_number(value: float | None) -> str:
    return TEXT.text(value)


def _status(row: dict[str, Any]) -> str:
    """`ok`, with the round it is of if late and what is noted of it if anything, or why not; both are text."""
    status, reason = row["status"], row["reason"]
    if status != "ok":
        return f"[{'yellow' if reason == CARRIED else 'red'}]{escape(status_of(row))}[/]"
    note = note_of(row)
    return f"{status_of(row)} ([yellow]{escape(safe_line(note))}[/yellow])" if note else status_of(row)


def note_of(row: Mapping[str, Any]) -> str:
    """What a person is to know of a facility whose update counted: what it noted, and what of it was left out."""
    return "; ".join(str(row[key]) for key in ("note", "unasked") if row.get(key))


def status_of(row: Mapping[str, Any]) -> str:
    """The status, with why a facility is missing, or the earlier round that its update was made for. Plain text."""
    reason, late = row["reason"], row.get("staleness", 0)
    if row["status"] != "ok" and reason != CARRIED:
        return f"{row['status']}: {safe_line(reason)}" if reason else str(row["status"])
    return f"{row['status']}, of round {row['round'] - late}" if late and row["status"] == "ok" else str(row["status"])

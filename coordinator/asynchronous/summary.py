"""Summary of a federation by groups: groups, facilities, which left and why; for people and as plain data."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import shown
from coordinator.asynchronous.buffer import FOLDER
from coordinator.asynchronous.semidecentral import STATE, SemiDecentralised


def groups_done(archive: Archive) -> int:
    """Groups carried out so far; 0 before the first run."""
    place = archive.path / FOLDER
    return len(SemiDecentralised(place).groups) if (place / STATE).exists() else 0


def summary(archive: Archive) -> dict[str, Any]:
    """Groups, facilities, failures, the final mean and why a run stopped, as JSON data. Raises `InputError`."""
    stopped = archive.read_note("stopped").get("reason")
    empty: dict[str, Any] = {
        "archive": str(archive.path),
        "groups": [],
        "facilities": {},
        "model": None,
        "stopped": stopped,
    }
    if not (archive.path / FOLDER / STATE).exists():
        return empty
    driver = SemiDecentralised(archive.path / FOLDER)
    members, active = driver.scheduler.members, driver.scheduler.active
    facilities = {}
    for name, rounds in sorted(driver.rounds.items()):
        failures = [failure for failure in driver.failures if failure["facility"] == name]
        if name not in members:
            status = "out"
        elif name not in active:
            status = "done"
        else:
            status = "waiting" if name in driver.scheduler.waiting else "under way"
        facilities[name] = {
            "rounds": rounds,
            "status": status,
            "reason": failures[-1]["reason"] if failures and status == "out" else "",
            "failures": failures,
        }
    return empty | {"groups": driver.groups, "facilities": facilities, "model": driver.final or None}


def table(data: dict[str, Any]) -> Table:
    """A rich table of `summary`'s data."""
    result = Table(title="groups and facilities", title_justify="left")
    for name, right in (
        ("group", 1),
        ("facility", 0),
        ("updates", 1),
        ("weight", 1),
        ("waited", 1),
        ("perplexity returned", 1),
    ):
        result.add_column(name, justify="right" if right else "left")
    result.add_column("why")
    for group in data["groups"]:
        for number, name in enumerate(group["members"]):
            told = group["perplexity_returned"].get(name)
            result.add_row(
                ("final" if group["final"] else str(group["number"])) if number == 0 else "",
                name,
                str(group["rounds"][name]),
                f"{group['weights'][name]:.3f}",
                f"{group['wait_seconds'][name]:.1f} s",
                "-" if told is None else f"{told:.3f}",
                escape(shown(group["reason"])) if number == 0 else "",
                end_section=number == len(group["members"]) - 1,
            )
    for name, facility in data["facilities"].items():
        if facility["status"] == "out":
            result.add_row(
                "", name, str(facility["rounds"]), "", "", "", f"[red]out: {escape(shown(facility['reason']))}[/red]"
            )
    return result

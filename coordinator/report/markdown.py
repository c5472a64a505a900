"""The report as Markdown: the same figures, for a repository or a mail."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.masked_rounds import masked_sentence
from coordinator.archive.privacy import nothing_promised
from coordinator.archive.table import any_late, format_accuracies, has_accuracy, seconds_of, status_of
from coordinator.comparison.matrix import SHADES
from coordinator.durations import format_duration
from coordinator.report.many import for_display
from coordinator.report.page import (
    any_waited,
    cell,
    figures,
    last_artefacts,
    nats_number,
    normal_interval,
    number,
    outliers,
    used_kinds,
)
from coordinator.shown_text import safe_line
from facility.exchange.sizes import format_bytes
from facility.exchange.task_words import words_of

EMPHASIS = re.compile(r"~|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""Marks of emphasis that are not escaped everywhere: an underscore within a word is none."""


def markdown(data: Mapping[str, Any]) -> str:
    """Text of `coordinator.report.data.gather`'s data."""
    data = for_display(data)
    lines = [f"# Federation {data['federation']}", ""]
    lines += [f"**Stopped:** {_cell(data['stopped'])}", ""] if data["stopped"] else []
    lines += [f"- {label}: **{value}**" for value, label in figures(data)] + [""]
    lines += [*(f"- {_cell(line)}" for line in data["remarks"]), ""] if data["remarks"] else []
    lines += rounds(data)
    lines += matrix(data) if data["matrix"].get("cells") else []
    lines += tasks(data)
    kinds = used_kinds(data)
    times = [
        [name, *(format_duration(sums[kind]) if kind in sums else "" for kind in kinds), format_duration(sums["idle"])]
        for name, sums in data["timeline"]["totals"].items()
    ]
    lines += ["## Time", "", *chosen(data, "time"), *table(["facility", *kinds, "idle"], times)]
    lines += traffic(data)
    waiting = any_waited(data)
    used = [
        [
            name,
            number(one["node_hours"]),
            *([number(one["waited_node_hours"])] if waiting else []),
            number(one["gpu_hours"]),
            number(one["kwh"]),
            one["energy_source"] or ("no counter" if one["rounds"] else ""),
            *([number(one["co2e_kg"])] if data["cost"]["carbon_g_per_kwh"] else []),
        ]
        for name, one in data["cost"]["facilities"].items()
    ]
    lost = ["of these waiting for a model"] if waiting else []
    head = ["facility", "node-hours", *lost, "GPU-hours", "kWh", "measured by"]
    head += ["kg CO₂e"] if data["cost"]["carbon_g_per_kwh"] else []
    lines += ["## Cost", "", *chosen(data, "cost"), *table(head, used)]
    lines += [*memory(data), *drift(data), *privacy(data)]
    odd = [[one["round"], one["facility"], one["done"], one["reason"]] for one in outliers(data)]
    lines += ["## Outliers", "", *table(["round", "facility", "what aggregation did", "why"], odd)]
    failed = [[one["round"], one["facility"], one["status"], one["reason"], one["done"]] for one in data["failures"]]
    lines += ["## Failures", "", *table(["round", "facility", "what", "reason", "what was done"], failed)]
    versions = [[name, ", ".join(f"{key} {one}" for key, one in of.items())] for name, of in data["versions"].items()]
    lines += ["## Versions", "", *table(["where", "packages"], versions)]
    digests = [[one["name"], one["sha256"]] for one in last_artefacts(data)]
    lines += ["## Artefacts", "", *table(["what", "SHA-256"], digests)]
    return "\n".join(lines).rstrip() + "\n"


def rounds(data: Mapping[str, Any]) -> list[str]:
    """The section with a line for each facility and round."""
    late, answers, words = any_late(data), has_accuracy(data), words_of(data.get("task", ""))
    rows = [
        [
            entry["round"],
            row["facility"],
            status_of(row),
            f"{words.count(row):,}",
            seconds_of(row["seconds"]),
            f"{row['weight']:.3f}",
            *([row.get("staleness", 0)] if late else []),
            nats_number(words, row["perplexity_received"]),
            nats_number(words, row["perplexity_returned"]),
            nats_number(words, entry["global_perplexity"]),
            *(format_accuracies(row) if answers else []),
        ]
        for entry in data["rounds"]
        for row in entry["facilities"]
    ]
    head = ["round", "facility", "status", words.unit, "seconds", "weight", *(["staleness"] if late else [])]
    head += [f"{words.metric} received", "returned", "global"]
    head += ["accuracy received", "accuracy returned"] if answers else []
    return ["## Rounds", "", *chosen(data, "rounds"), *table(head, rows)]


def traffic(data: Mapping[str, Any]) -> list[str]:
    """The section on bytes and speeds of transfers."""
    moved = [
        [
            name,
            format_bytes(one["to_bytes"]),
            number(one["to_mbit_per_second"]),
            format_bytes(one["from_bytes"]),
            number(one["from_mbit_per_second"]),
            format_bytes(one["moments_bytes"]),
        ]
        for name, one in data["traffic"].items()
    ]
    return [
        "## Traffic",
        "",
        *chosen(data, "traffic"),
        *table(["facility", "sent", "Mbit/s", "received", "Mbit/s", "of these, moments"], moved),
    ]


def memory(data: Mapping[str, Any]) -> list[str]:
    """The section on memory, predicted beside measured."""
    rows = [
        [
            name,
            format_bytes(one["predicted_memory_bytes"] or 0),
            format_bytes(one["peak_memory_bytes"]),
            number(one["ratio"]),
        ]
        for name, one in data["predictions"].items()
    ]
    head = ["facility", "predicted", "measured", "measured / predicted"]
    return ["## Memory of the largest rank", "", *chosen(data, "memory"), *table(head, rows)]


def drift(data: Mapping[str, Any]) -> list[str]:
    """The section on the correction of drift; nothing where there is none."""
    rows = [
        [
            name,
            one["rounds"],
            one["corrected"],
            number(one["first_share"]),
            number(one["latest_share"]),
            safe_line(one["uncorrected"]),
        ]
        for name, one in data["drift"].items()
    ]
    head = ["facility", "rounds", "corrected", "part of the steps, first", "latest", "without a correction"]
    return ["## Correction of drift", "", *chosen(data, "drift"), *table(head, rows)] if rows else []


def privacy(data: Mapping[str, Any]) -> list[str]:
    """The section on privacy spent and on masks; nothing where there is neither."""
    budgets = [
        [
            name,
            number(one["spent"]),
            one["epsilon"],
            one["delta"],
            one["unit"],
            number(one["noise_multiplier"]),
            one["steps"],
            number(one["spent_on_validation"]),
            number(one["validation_deviation"]),
        ]
        for name, one in data["privacy"].get("facilities", {}).items()
    ]
    without = data["privacy"].get("without_budget", {})
    gaps = [f"{name}: {nothing_promised(rounds)}." for name, rounds in without.items()]
    titles = ["facility", "epsilon so far", "at the end", "delta", "unit", "noise multiplier", "steps"]
    titles += ["epsilon so far, validation data", "noise in losses, nats"]
    masks = [f"{masked_sentence(data['masking'])}.".capitalize(), ""] if data["masking"] else []
    lines = [*table(titles, budgets), *(line for gap in gaps for line in (gap, ""))] if budgets else []
    return ["## Privacy", "", *lines, *masks] if budgets or masks else []


def tasks(data: Mapping[str, Any]) -> list[str]:
    """The section with scores of the models that rounds received; nothing where no task was evaluated."""
    rows = [
        [one["round"], one["facility"], one["task"], one["metric"], number(one["value"]), number(one["stderr"])]
        for one in data["tasks"]
    ]
    head = ["received in round", "where", "task", "metric", "value", "standard error"]
    return ["## Tasks", "", *table(head, rows)] if rows else []


def matrix(data: Mapping[str, Any]) -> list[str]:
    """The section that compares models on each facility's data."""
    models = data["matrix"]["models"]
    shown_rows = [[row, *(cell(data, row, model) for model in models)] for row in data["matrix"]["data"]]
    lines = [f"## Data × model ({words_of(data.get('task', '')).metric})", "", *table(["data", *models], shown_rows)]
    lines += [_cell(data["matrix"].get("caption", "").replace(SHADES, "")), ""]
    sentences = [*data["matrix"].get("summary", []), *data["matrix"].get("verdicts", [])]
    lines += [f"- {_cell(line)}" for line in sentences] + [""]
    gaps = data["matrix"].get("gaps", {})
    lines += [f"- **{_cell(name)}:** {_cell(reason)}" for name, reason in gaps.items()] + [""]
    scores = [
        [one["task"], one["metric"], one["model"], one["facility"], number(one["value"]), normal_interval(one)]
        for one in data["matrix"].get("tasks", [])
    ]
    head = ["task", "metric", "model", "where", "value", "95 % interval"]
    return [*lines, *(table(head, scores) if scores else [])]


def chosen(data: Mapping[str, Any], name: str) -> list[str]:
    """Which facilities a table shows, where it does not show all."""
    sentence = data["chosen"][name].removeprefix(": ")
    return [f"{sentence[0].upper()}{sentence[1:]}.", ""] if sentence else []


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table, or a line that says that there is nothing."""
    if not rows:
        return ["None.", ""]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(_cell(one) for one in row)} |" for row in rows), ""]


def _cell(value: Any) -> str:
    """Text that may come from a facility, harmless in Markdown: no markup, and no link, be it a bare address."""
    text = "" if value is None else safe_line(value)
    for mark in ("\\", "|", "<", "[", "*", "`", "&", "@", "://", "www."):
        text = text.replace(mark, f"{mark[:-1]}\\{mark[-1]}")
    return EMPHASIS.sub(r"\\\g<0>", text)

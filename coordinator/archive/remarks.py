"""What a person reads of an archive below its table, a sentence a line."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.many import NAMED, too_many_to_list
from coordinator.archive.masked_rounds import masked_sentence
from coordinator.archive.privacy import budget_sentence, latest_privacy, without_budget
from coordinator.archive.rounds import CARRIED
from coordinator.shown_text import safe_line
from facility.exchange.text import number_of


def summary_remarks(data: dict[str, Any]) -> list[str]:
    """How the federation was aggregated, privacy budgets, and what the guard did, as lines below the table."""
    chosen = [f"aggregation: {safe_line(data['aggregation'])}"] if data.get("aggregation") else []
    rows = [row for entry in data["rounds"] for row in entry["facilities"]]
    told = [*data.get("privacy_set_aside", []), *rows, *data.get("final_evaluation", [])]
    budgets = _budgets(latest_privacy(told), without_budget(rows))
    if data.get("masking"):
        budgets.append(masked_sentence(data["masking"]))
    lines = [f"round {row['round']}: {safe_line(row['guard'])}" for row in data["rounds"] if row.get("guard")]
    if shares := [row["present"] for row in data["rounds"] if row.get("present", 1.0) < 1]:
        some = " to ".join(dict.fromkeys(f"{one:.2f}" for one in (min(shares), max(shares))))
        lines.append(f"rounds that facilities missed: {len(shares)}, at {some} of the server learning rate")
    lines += [
        f"from round {row['round']} on: {safe_line(one)}" for row in data["rounds"] for one in row.get("changes", [])
    ]
    for row in data["rounds"]:
        if row.get("next_steps_reason", "").startswith("moved") and not row.get("next_end"):
            steps = _steps(row["next_steps"])
            lines.append(f"steps from round {row['round'] + 1} on: {steps} ({safe_line(row['next_steps_reason'])})")
    if any(row.get("next_end") for row in data["rounds"]):
        lines.append(_elastic(rows))
    if any(row["reason"] == CARRIED for row in rows):
        lines.append(f"late: {CARRIED}, which the column for staleness shows")
    lines += _left_open([row["wait"] for row in data["rounds"] if row.get("wait")])
    lines += _waited(data.get("waited_node_seconds", {}))
    if aside := data.get("set_aside_rounds"):
        counted = "which node-hours, energy, bytes and waiting count"
        lines.append(f"set aside by crossfed rewind: {number_of(aside, 'round')}, {counted}")
    if data.get("limited"):
        best = data["best_round"]
        which = "the initial one" if best < 0 else f"that of round {best}"
        lines.append(f"ended in order, at the best model, which is {which}: {safe_line(data['limited'])}")
    return [*chosen, *budgets, *lines]


def _elastic(rows: Sequence[Mapping[str, Any]]) -> str:
    """Fewest and most steps of each facility, where jobs took as many as fitted."""
    taken: dict[str, list[int]] = {}
    for row in rows:
        if row["status"] == "ok" and row["steps"]:
            taken.setdefault(row["facility"], []).append(row["steps"])
    if too_many_to_list(taken):
        every = [one for steps in taken.values() for one in steps]
        taken = {f"{len(taken)} facilities": every}
    ranges = (f"{safe_line(name)} {min(steps):,} to {max(steps):,}" for name, steps in sorted(taken.items()))
    return f"steps that fitted until the expected end of their round: {', '.join(ranges)}"


def _budgets(found: Mapping[str, Mapping[str, Any]], without: Mapping[str, Sequence[int]]) -> list[str]:
    """Each facility's privacy budget; of many those for which nothing is promised, and that have least of it left."""
    sentences = {name: budget_sentence(safe_line(name), one, without.get(name, ())) for name, one in found.items()}
    if not too_many_to_list(found):
        return list(sentences.values())
    left = {name: one["epsilon"] - one["spent"] for name, one in found.items()}
    least = sorted(found, key=lambda name: (name not in without, left[name]))[:NAMED]
    return [*(sentences[name] for name in least), f"privacy of {len(found) - NAMED} more: more of epsilon is left"]


def _left_open(waits: Sequence[Mapping[str, Any]]) -> list[str]:
    """How long rounds stayed open after their quorum where that was learned: the median, the shortest, the longest."""
    learned = sorted(one["seconds"] for one in waits if one["learned"])
    if not learned:
        return []
    seconds = f"{statistics.median(learned):,.0f} s (median; {learned[0]:,.0f} to {learned[-1]:,.0f})"
    return [
        f"rounds.grace is auto: {len(learned)} of {number_of(len(waits), 'round')} stayed open for {seconds} "
        "after their quorum"
    ]


def _steps(steps: Mapping[str, int]) -> str:
    """The steps of each facility; of many the fewest and the most."""
    if not too_many_to_list(steps):
        return ", ".join(f"{name} {count}" for name, count in steps.items())
    fewest, most = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
    return f"{len(steps)} facilities {steps[fewest]} ({fewest}) to {steps[most]} ({most})"


def _waited(seconds: Mapping[str, float]) -> list[str]:
    """Node-hours lost to waiting, by facility; of many the sum and the most."""
    what = "node-hours in jobs that waited for their model"
    lines = [f"{safe_line(name)}: {one / 3600:.3g} {what}" for name, one in seconds.items()]
    if not too_many_to_list(seconds):
        return lines
    most = sorted(seconds, key=lambda name: -seconds[name])[:NAMED]
    named = ", ".join(f"{safe_line(name)} {seconds[name] / 3600:.3g}" for name in most)
    return [f"{len(seconds)} facilities: {sum(seconds.values()) / 3600:.3g} {what} (most: {named})"]

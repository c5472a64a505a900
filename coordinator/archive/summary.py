"""The archive as a person reads it: a table of rounds and facilities, and the same as plain data."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from coordinator.archive.averaged import averaged
from coordinator.archive.best import best_round
from coordinator.archive.journal import Entry, Journal, waited_by_facility
from coordinator.archive.many import NAMED, first_groups, grouped, kind_of, many, names_of
from coordinator.archive.masked_rounds import masked_rounds, masked_sentence
from coordinator.archive.privacy import latest_privacy, sentence, without_budget
from coordinator.archive.rewind import count_set_aside, rounds_set_aside
from coordinator.archive.rounds import CARRIED, Archive, RoundFile
from coordinator.archive.task import task_of
from facility.exchange.messages.strict_json import clean
from facility.exchange.perplexity import LARGEST_LOSS, perplexity
from facility.exchange.task_words import TEXT, TaskWords, words_of
from facility.exchange.text import number_of

LONGEST_SHOWN = 2000
"""Characters."""
MEDIANS = ("perplexity_received", "perplexity_returned", "accuracy_received", "accuracy_returned")
"""Figures of which one row for several facilities has the median."""


def shown_perplexity(loss: float | None) -> float | None:
    """None where there is none to show."""
    return None if loss is None or not math.isfinite(loss) or loss > LARGEST_LOSS else perplexity(loss)


def shown(text: object) -> str:
    """Text that may come from a facility, as one line of printable characters of limited length."""
    return clean(str(text), LONGEST_SHOWN)


def summary(archive: Archive) -> dict[str, Any]:
    """Rounds, final evaluation and the reason of an early stop, as JSON data.

    `global_perplexity` of a round is that of the model it *made*: reported by the next round's
    facilities, which receive it; `global_perplexity_over` names those whose figures count.
    """
    return summary_of(archive, archive.history(), rounds_set_aside(archive), Journal(archive.path).read())


def summary_of(
    archive: Archive, history: list[RoundFile], aside: Sequence[RoundFile], entries: Sequence[Entry]
) -> dict[str, Any]:
    """`summary` of an archive whose rounds, those set aside and `events.jsonl` were read."""
    evaluation = archive.read_note("evaluation")
    evaluated = evaluation.get("after_round") == len(history) - 1 and evaluation.get("global_loss") is not None
    losses, overs = _losses_of_models(history, evaluation if evaluated else {})
    limited = archive.read_note("limited")
    mean = averaged(archive)
    ended = limited.get("after_round") == len(history) - 1 and not limited.get("moved")
    best = _best(archive, losses) if ended else None
    rounds = [_round_row(*one) for one in zip(history, losses[1:], overs[1:], strict=True)]
    return {
        "archive": str(archive.path),
        "task": task_of(archive, history),
        "rounds": rounds,
        "initial_perplexity": shown_perplexity(losses[0]) if history else None,
        "final_scores": evaluation.get("scores", {}) if evaluated else {},
        "final_evaluation": evaluation.get("facilities", []) if evaluated else [],
        "model": _final(archive, len(history) if best is None else best) if mean is None else str(mean.model),
        "averaged": mean.rounds if mean is not None else [],
        "best_round": None if best is None else best - 1,
        "limited": limited.get("reason", "") if best is not None else "",
        "stopped": archive.read_note("stopped").get("reason") or _broken(history),
        "masking": masked_rounds(history),
        "set_aside_rounds": count_set_aside(archive),
        "privacy_set_aside": _budgets_of(aside),
        "waited_node_seconds": waited_by_facility(entries),
    }


def _budgets_of(rounds: Sequence[RoundFile]) -> list[dict[str, Any]]:
    """What facilities told of their privacy budgets."""
    rows = [row for entry in rounds for row in entry.facilities if row.privacy]
    return [{"facility": row.facility, "privacy": row.privacy} for row in rows]


def _losses_of_models(
    history: Sequence[RoundFile], evaluation: Mapping[str, Any]
) -> tuple[list[float | None], list[list[str]]]:
    """Loss of each model, the initial one first, and the facilities that it is the mean over.

    A round reports the loss of the model that it received, so the last model's is that of the final `evaluation`. What
    facilities that were late have told since replaces what its round said.
    """
    losses = [*(entry.global_loss for entry in history), evaluation.get("global_loss")]
    overs = [*(entry.global_loss_over for entry in history), evaluation.get("global_loss_over", [])]
    for entry in history:
        for number, later in entry.later_losses.items():
            if int(number) < len(losses):
                losses[int(number)], overs[int(number)] = later.loss, later.over
    return losses, overs


def _round_row(entry: RoundFile, made: float | None, over: list[str]) -> dict[str, Any]:
    """A round as JSON data. `made`: loss of the model that it made, the mean over the facilities `over`."""
    return {
        "round": entry.round,
        "decision": entry.decision,
        "finished": entry.finished,
        "attempts": entry.attempts,
        "global_perplexity": shown_perplexity(made),
        "global_perplexity_over": over,
        "outer_factor": entry.outer_factor,
        "guard": entry.guard,
        "changes": entry.changes,
        "present": entry.present,
        "next_steps": entry.next_steps,
        "next_steps_reason": entry.next_steps_reason,
        "next_end": entry.next_end,
        "wait": None if entry.wait is None else dataclasses.asdict(entry.wait),
        "scores": entry.scores,
        "facilities": [dataclasses.asdict(facility) for facility in entry.facilities],
    }


def _final(archive: Archive, number: int) -> str | None:
    return str(archive.model_for(number)) if archive.path.is_dir() else None


def _best(archive: Archive, losses: list[float | None]) -> int:
    """The round that would receive the best model: the newest, where its loss is not known or no other is better."""
    newest = len(losses) - 1
    if losses[-1] is None:
        return newest
    best = best_round(losses)
    return best if best is not None and archive.model_for(best).is_dir() else newest


def _broken(history: list[RoundFile]) -> str | None:
    return history[-1].decision if history and history[-1].broken else None


def table(data: dict[str, Any]) -> Table:
    """A rich table of `summary`'s data; with a column for staleness where an update came late."""
    late = any_late(data)
    result = Table(title="rounds and facilities", title_justify="left")
    answers, words = has_accuracy(data), words_of(data.get("task", ""))
    left = ("facility", "status")
    names = ("round", *left, words.unit, "seconds", "weight", *(["staleness"] if late else []))
    more = ("accuracy received", "accuracy returned") if answers else ()
    for name in (*names, f"{words.metric} received", f"{words.metric} returned", "global model", *more):
        result.add_column(name, justify="left" if name in left else "right")
    for entry in data["rounds"]:
        alone, together = to_show(entry["facilities"])
        if together:
            end = "" if alone else words.text(entry["global_perplexity"])
            accuracy_cells = _middle_accuracies(together) if answers else []
            result.add_row(
                str(entry["round"]), *_cells_of_many(together, words, late), end, *accuracy_cells, end_section=not alone
            )
        for place, row in enumerate(alone):
            last = place == len(alone) - 1
            result.add_row(
                str(entry["round"]) if place == 0 and not together else "",
                row["facility"],
                _status(row),
                f"{words.count(row):,}",
                seconds_of(row["seconds"]),
                f"{row['weight']:.3f}",
                *([str(row.get("staleness", 0))] if late else []),
                words.text(row["perplexity_received"]),
                words.text(row["perplexity_returned"]),
                words.text(entry["global_perplexity"]) if last else "",
                *(accuracies(row) if answers else []),
                end_section=last,
            )
    alone, together = to_show(data["final_evaluation"])
    if together:
        name, status, _, seconds, _, received, _ = _cells_of_many(together, words)
        accuracy_cells = _middle_accuracies(together) if answers else []
        result.add_row("final", name, status, "", seconds, *_blank(late), received, "", "", *accuracy_cells)
    for row in alone:
        status = _status(row)
        result.add_row(
            "final",
            row["facility"],
            status,
            "",
            seconds_of(row["seconds"]),
            *_blank(late),
            words.text(row["perplexity_received"]),
            "",
            "",
            *(accuracies(row) if answers else []),
        )
    return result


def any_late(data: Mapping[str, Any]) -> bool:
    """Whether some update came in a later round than it was made for."""
    return any(row.get("staleness") for entry in data["rounds"] for row in entry["facilities"])


def _blank(late: bool) -> list[str]:
    """Cells of weight and staleness that say nothing."""
    return ["", ""] if late else [""]


def has_accuracy(data: Mapping[str, Any]) -> bool:
    """True if most facilities that evaluated reported an accuracy: a single facility does not decide it."""
    rows = [row for entry in data["rounds"] for row in entry["facilities"]] + data["final_evaluation"]
    reported = [row.get("accuracy_received") is not None for row in rows if row.get("perplexity_received") is not None]
    return 2 * sum(reported) > len(reported)


def accuracies(row: Mapping[str, Any]) -> list[str]:
    """Accuracies of the received and the returned model, as text."""
    return [number(row.get("accuracy_received")), number(row.get("accuracy_returned"))]


def _middle_accuracies(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The medians of many facilities."""
    return [number(median_of(rows, key)) for key in ("accuracy_received", "accuracy_returned")]


def to_show(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that are shown one by one, and those that one line stands for: of many facilities only those that failed,
    came late or have a note are shown by name, and of many of these one row for all to which the same happened."""
    if not many(rows):
        return list(rows), []
    odd = [row for row in rows if row["status"] != "ok" or note_of(row) or row.get("staleness")]
    sound = [row for row in rows if row["status"] == "ok" and not note_of(row) and not row.get("staleness")]
    shown_groups, rest = first_groups(grouped(odd, _what_happened))
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


def _cells_of_many(rows: Sequence[dict[str, Any]], words: TaskWords, late: bool = False) -> list[str]:
    """One line for facilities that are all well: sums of what was trained on and of weights, medians of the rest."""
    return [
        f"{len(rows)} facilities",
        "ok (medians)",
        f"{sum(map(words.count, rows)):,}",
        seconds_of(median_of(rows, "seconds") or 0.0),
        f"{sum(row['weight'] for row in rows):.3f}",
        *(["0"] if late else []),
        words.text(median_of(rows, "perplexity_received")),
        words.text(median_of(rows, "perplexity_returned")),
    ]


def _elastic(rows: Sequence[Mapping[str, Any]]) -> str:
    """Fewest and most steps of each facility, where jobs took as many as fitted."""
    taken: dict[str, list[int]] = {}
    for row in rows:
        if row["status"] == "ok" and row["steps"]:
            taken.setdefault(row["facility"], []).append(row["steps"])
    if many(taken):
        every = [one for steps in taken.values() for one in steps]
        taken = {f"{len(taken)} facilities": every}
    ranges = (f"{shown(name)} {min(steps):,} to {max(steps):,}" for name, steps in sorted(taken.items()))
    return f"steps that fitted until the expected end of their round: {', '.join(ranges)}"


def remarks(data: dict[str, Any]) -> list[str]:
    """How the federation was aggregated, privacy budgets, and what the guard did, as lines below the table."""
    chosen = [f"aggregation: {shown(data['aggregation'])}"] if data.get("aggregation") else []
    rows = [row for entry in data["rounds"] for row in entry["facilities"]]
    budgets = _budgets(latest_privacy([*data.get("privacy_set_aside", []), *rows]), without_budget(rows))
    if data.get("masking"):
        budgets.append(masked_sentence(data["masking"]))
    lines = [f"round {row['round']}: {shown(row['guard'])}" for row in data["rounds"] if row.get("guard")]
    if shares := [row["present"] for row in data["rounds"] if row.get("present", 1.0) < 1]:
        some = f"{min(shares):.2f} to {max(shares):.2f}" if len(shares) > 1 else f"{shares[0]:.2f}"
        lines.append(f"rounds that facilities missed: {len(shares)}, at {some} of the server learning rate")
    lines += [f"from round {row['round']} on: {shown(one)}" for row in data["rounds"] for one in row.get("changes", [])]
    for row in data["rounds"]:
        if row.get("next_steps_reason", "").startswith("moved") and not row.get("next_end"):
            steps = _steps(row["next_steps"])
            lines.append(f"steps from round {row['round'] + 1} on: {steps} ({shown(row['next_steps_reason'])})")
    if any(row.get("next_end") for row in data["rounds"]):
        lines.append(_elastic(rows))
    if any(row["reason"] == CARRIED for row in rows):
        lines.append(f"late: {CARRIED}, which the column for staleness tells")
    lines += _left_open([row["wait"] for row in data["rounds"] if row.get("wait")])
    lines += _waited(data.get("waited_node_seconds", {}))
    if aside := data.get("set_aside_rounds"):
        counted = "which node-hours, energy, bytes and waiting count"
        lines.append(f"set aside by crossfed rewind: {number_of(aside, 'round')}, {counted}")
    if data.get("limited"):
        best = data["best_round"]
        which = "the initial one" if best < 0 else f"that of round {best}"
        lines.append(f"ended in order, at the best model, which is {which}: {shown(data['limited'])}")
    return [*chosen, *budgets, *lines]


def _budgets(found: Mapping[str, Mapping[str, Any]], without: Mapping[str, Sequence[int]]) -> list[str]:
    """Each facility's privacy budget; of many those for which nothing is promised, and that have least of it left."""
    sentences = {name: sentence(shown(name), one, without.get(name, ())) for name, one in found.items()}
    if not many(found):
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
    if not many(steps):
        return ", ".join(f"{name} {count}" for name, count in steps.items())
    fewest, most = min(steps, key=lambda name: steps[name]), max(steps, key=lambda name: steps[name])
    return f"{len(steps)} facilities {steps[fewest]} ({fewest}) to {steps[most]} ({most})"


def _waited(seconds: Mapping[str, float]) -> list[str]:
    """Node-hours lost to waiting, by facility; of many the sum and the most."""
    what = "node-hours in jobs that waited for their model"
    lines = [f"{shown(name)}: {one / 3600:.3g} {what}" for name, one in seconds.items()]
    if not many(seconds):
        return lines
    most = sorted(seconds, key=lambda name: -seconds[name])[:NAMED]
    named = ", ".join(f"{shown(name)} {seconds[name] / 3600:.3g}" for name in most)
    return [f"{len(seconds)} facilities: {sum(seconds.values()) / 3600:.3g} {what} (most: {named})"]


def seconds_of(seconds: float) -> str:
    """Empty where a job reported none: a job never takes zero seconds."""
    return f"{seconds:.1f}" if seconds else ""


def number(value: float | None) -> str:
    return TEXT.text(value)


def _status(row: dict[str, Any]) -> str:
    """`ok`, with the round it is of if late and what is noted of it if anything, or why not; both are text."""
    status, reason = row["status"], row["reason"]
    if status != "ok":
        return f"[{'yellow' if reason == CARRIED else 'red'}]{escape(status_of(row))}[/]"
    note = note_of(row)
    return f"{status_of(row)} ([yellow]{escape(shown(note))}[/yellow])" if note else status_of(row)


def note_of(row: Mapping[str, Any]) -> str:
    """What a person is to know of a facility whose update counted: what it noted, and what of it was left out."""
    return "; ".join(str(row[key]) for key in ("note", "unasked") if row.get(key))


def status_of(row: Mapping[str, Any]) -> str:
    """The status, with why a facility is missing, or the earlier round that its update was made for. Plain text."""
    reason, late = row["reason"], row.get("staleness", 0)
    if row["status"] != "ok" and reason != CARRIED:
        return f"{row['status']}: {shown(reason)}" if reason else str(row["status"])
    return f"{row['status']}, of round {row['round'] - late}" if late and row["status"] == "ok" else str(row["status"])

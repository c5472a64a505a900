"""The archive as plain data: rounds and facilities, the final evaluation, and why it ended."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.averaged import read_averaged
from coordinator.archive.best import best_round
from coordinator.archive.journal import Entry, Journal, waited_by_facility
from coordinator.archive.masked_rounds import masked_rounds
from coordinator.archive.rewind import EVALUATION, count_set_aside, evaluations_set_aside, rounds_set_aside
from coordinator.archive.rounds import Archive, RoundFile
from coordinator.archive.task import task_of
from facility.exchange.perplexity import LARGEST_LOSS, perplexity


def shown_perplexity(loss: float | None) -> float | None:
    """None where there is none to show."""
    return None if loss is None or not math.isfinite(loss) or loss > LARGEST_LOSS else perplexity(loss)


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
    evaluation = archive.read_note(EVALUATION)
    asked = evaluation.get("after_round") == len(history) - 1
    evaluated = asked and evaluation.get("global_loss") is not None
    losses, overs = _losses_of_models(history, evaluation if evaluated else {})
    limited = archive.read_note("limited")
    mean = read_averaged(archive)
    ended = limited.get("after_round") == len(history) - 1 and not limited.get("moved")
    best = _best(archive, losses) if ended else None
    rounds = [_round_row(*one) for one in zip(history, losses[1:], overs[1:], strict=True)]
    return {
        "archive": str(archive.path),
        "task": task_of(archive, history),
        "rounds": rounds,
        "initial_perplexity": shown_perplexity(losses[0]) if history else None,
        "final_scores": evaluation.get("scores", {}) if evaluated else {},
        "final_evaluation": evaluation.get("facilities", []) if asked else [],
        "model": _final(archive, len(history) if best is None else best) if mean is None else str(mean.model),
        "averaged": mean.rounds if mean is not None else [],
        "best_round": None if best is None else best - 1,
        "limited": limited.get("reason", "") if best is not None else "",
        "stopped": archive.read_note("stopped").get("reason") or _broken(history),
        "masking": masked_rounds(history),
        "set_aside_rounds": count_set_aside(archive),
        "privacy_set_aside": _budgets_of(aside, [*evaluations_set_aside(archive), *([] if asked else [evaluation])]),
        "waited_node_seconds": waited_by_facility(entries),
    }


def _budgets_of(rounds: Sequence[RoundFile], evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What facilities reported of their privacy budgets, also in evaluations of models that are not the last any more:
    a loss that was released stays so."""
    rows = [(row.facility, row.privacy) for entry in rounds for row in entry.facilities]
    rows += [(row["facility"], row.get("privacy")) for one in evaluations for row in one.get("facilities", [])]
    return [{"facility": name, "privacy": told} for name, told in rows if told]


def _losses_of_models(
    history: Sequence[RoundFile], evaluation: Mapping[str, Any]
) -> tuple[list[float | None], list[list[str]]]:
    """Loss of each model, the initial one first, and the facilities that it is the mean over.

    A round reports the loss of the model that it received, so the last model's is that of the final `evaluation`. What
    facilities that were late have reported since replaces what its round said.
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

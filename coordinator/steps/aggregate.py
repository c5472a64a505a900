"""`python -m coordinator.steps.aggregate`: average a round's updates, append it to the archive, decide what follows.

Never fails for a facility's fault (a step that fails inside the loop hangs the engine): it ends the loop and leaves the
reason in the archive, where the report step finds it.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from coordinator.aggregation.sources import DamagedUpdate
from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.events.event import emit, failures_of
from coordinator.rounds.order import sign_order_or_warn
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.blame import to_blame
from coordinator.steps.commit import commit
from coordinator.steps.final import close_final
from coordinator.steps.following import ends_anew
from coordinator.steps.incomplete import ask_again, remember_failed, too_few, wait_for_late
from coordinator.steps.next_round import NextRound
from coordinator.steps.options import step_parser
from facility.exchange.errors import CrossFedError, exit_on_error
from facility.exchange.files.paths import resolve_path
from facility.exchange.json_values import values_in
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger("coordinator.steps.aggregate")


def close_round(round: CollectedRound) -> NextRound:
    """Close the round: ask for it again, end the run with a reason, or append the round and decide what follows."""
    settings, again = round.settings, NextRound(round.model, round.number, proceed=True)
    if round.number >= settings.rounds:
        return close_final(round)
    if ask_again(round):
        return again
    least = max(settings.minimum_facilities, settings.aggregation.fewest_updates)
    while True:
        found = len(round.arrived.updates)
        if settings.closing is not None and found < least and wait_for_late(round):
            return again
        if found < settings.minimum_facilities:
            return too_few(round)
        try:
            return commit(round)
        except Exception as error:
            blamed = to_blame(error, round)
            if not blamed:
                remember_failed(round)
                raise
            reason_text = clean_text(str(error) or repr(error))
            log.warning("round %d is averaged without %s: %s", round.number, ", ".join(sorted(blamed)), reason_text)
            for name, reason in blamed.items():
                round = round.without(name, reason)
                emit("refused", facility=name, round=round.number, reason=round.arrived.failures[name].reason)
            if isinstance(error, DamagedUpdate) and ask_again(round):
                return again


def arguments_of(step: str, text: str | None) -> argparse.ArgumentParser:
    """The options of the steps that close a round."""
    parser = step_parser(step, text, "archive", "model", "round", "updates")
    parser.add_argument("--scores", type=Path, help="the coordinator's own evaluation of the model, JSON")
    return parser


def main() -> int:
    return run_step(arguments_of("aggregate", __doc__).parse_args(), close_round)


def run_step(arguments: argparse.Namespace, close: Callable[[CollectedRound], NextRound]) -> int:
    """Close the round by `close`; whatever goes wrong ends the run with its reason in the archive."""
    settings = read_coordinator_settings(arguments.federation)
    archive = Archive(resolve_path(arguments.archive))
    try:
        arrived = sort_out(arguments.updates, settings.facilities, arguments.round)
        if arguments.scores is not None:
            arrived = dataclasses.replace(arrived, scores=values_in(arguments.scores))
        following = close(
            CollectedRound(
                archive=archive, settings=settings, model=arguments.model, number=arguments.round, arrived=arrived
            )
        )
        if following.proceed and following.number == arguments.round < settings.rounds:
            ends_anew(archive, settings)  # the same round again, whose end may have passed
            # What was given here states the old end.
            following = following._replace(model=archive.model_for(arguments.round))
    except Exception as error:  # a step that fails inside the loop hangs the engine
        if not isinstance(error, CrossFedError | OSError):
            traceback.print_exc()
        reason = str(error) if isinstance(error, CrossFedError | OSError) else repr(error)
        with failures_of("aggregate"):
            archive.write_note("stopped", {"round": arguments.round, "reason": reason})
        log.error("round %d cannot be closed: %s", arguments.round, clean_text(reason))
        following = NextRound(arguments.model, arguments.round, proceed=False)
    sign_order_or_warn(following.deliver(), settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

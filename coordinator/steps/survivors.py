"""`python -m coordinator.steps.survivors`: settle whose masked updates are summed, and what is asked for."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.steps.arrived import sort_out
from coordinator.steps.masked_round import settle
from facility.exchange.errors import exit_on_error
from facility.exchange.files.paths import resolve
from facility.exchange.logs import add_log_options

log = logging.getLogger("coordinator.steps.survivors")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.steps.survivors", description=__doc__)
    add = parser.add_argument
    add("--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`")
    add("--archive", required=True, help="archive directory; relative paths count from $CROSSFED_HOME or the checkout")
    add("--model", type=Path, required=True, help="global model that the round started from")
    add("--round", type=int, required=True, help="number of the round, from 0")
    add("--roster", type=Path, required=True, help="roster of the round")
    add("--updates", type=Path, nargs="*", default=[], help="directories from the receive steps")
    add("--out", type=Path, required=True, help="directory to make")
    add_log_options(parser)
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    request = settle(
        Archive(resolve(arguments.archive)),
        settings,
        model=arguments.model,
        number=arguments.round,
        roster=arguments.roster,
        arrived=sort_out(arguments.updates, settings.facilities, arguments.round),
        out=arguments.out,
    )
    if arguments.round < settings.rounds:
        log.info("round %d: the sum is over %s", arguments.round, ", ".join(request.survivors) or "no update")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

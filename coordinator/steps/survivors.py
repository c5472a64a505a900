"""`python -m coordinator.steps.survivors`: settle whose masked updates are summed, and what is asked for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.masked_round import settle
from coordinator.steps.options import step_parser
from facility.exchange.errors import exit_on_error
from facility.exchange.files.paths import resolve_path

log = logging.getLogger("coordinator.steps.survivors")


def main() -> int:
    parser = step_parser("survivors", __doc__, "archive", "model", "round", "updates")
    parser.add_argument("--roster", type=Path, required=True, help="roster of the round")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    collected = CollectedRound(
        archive=Archive(resolve_path(arguments.archive)),
        settings=settings,
        model=arguments.model,
        number=arguments.round,
        arrived=sort_out(arguments.updates, settings.facilities, arguments.round),
    )
    request = settle(collected, roster=arguments.roster, out=arguments.out)
    if arguments.round < settings.rounds:
        log.info("round %d: the sum is over %s", arguments.round, ", ".join(request.survivors) or "no update")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

"""`python -m coordinator.steps.roster`: collect the facilities' keys into the roster of the round."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.events.event import emit
from coordinator.masking.pending import Pending
from coordinator.masking.rosters import make_roster
from coordinator.steps.options import step_parser
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.unmasking import ROSTER

log = logging.getLogger("coordinator.steps.roster")


def main() -> int:
    parser = step_parser("roster", __doc__, "archive", "model", "round")
    parser.add_argument("--keys", type=Path, nargs="*", default=[], help="directories from the steps `keys`")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    arguments = parser.parse_args()
    settings, archive = read_coordinator_settings(arguments.federation), Archive(resolve_path(arguments.archive))
    pending = Pending(archive=archive, round=arguments.round)
    if arguments.round < settings.rounds and pending.find(arguments.model):
        link_tree(pending.request / ROSTER, arguments.out)
        log.info("round %d: its updates are there and wait to be unmasked, under the same keys", arguments.round)
        return 0
    with new_directory(arguments.out) as temporary:
        refused = make_roster(temporary, archive=archive, settings=settings, model=arguments.model, keys=arguments.keys)
    for reason in refused.values():
        log.warning("round %d: no keys: %s", arguments.round, reason)
        emit("problem", text=f"round {arguments.round}: no keys: {reason}")  # its job can only say that they are absent
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

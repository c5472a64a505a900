"""`python -m coordinator.steps.roster`: collect the facilities' keys into the roster of the round."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.settings import read_coordinator_settings
from coordinator.masking.pending import Pending
from coordinator.masking.rosters import make_roster
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve
from facility.exchange.logs import add_log_options
from facility.exchange.masking.unmasking import ROSTER

log = logging.getLogger("coordinator.steps.roster")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.steps.roster", description=__doc__)
    add = parser.add_argument
    add("--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`")
    add("--archive", required=True, help="archive directory; relative paths count from $CROSSFED_HOME or the checkout")
    add("--model", type=Path, required=True, help="global model that the round starts from")
    add("--round", type=int, required=True, help="number of the round, from 0")
    add("--keys", type=Path, nargs="*", default=[], help="directories from the steps `keys`")
    add("--out", type=Path, required=True, help="directory to make")
    add_log_options(parser)
    arguments = parser.parse_args()
    settings, archive = read_coordinator_settings(arguments.federation), Archive(resolve(arguments.archive))
    pending = Pending(archive=archive, round=arguments.round)
    if arguments.round < settings.rounds and pending.find(arguments.model):
        link_tree(pending.request / ROSTER, arguments.out)
        log.info("round %d: its updates are there and wait to be unmasked, under the same keys", arguments.round)
        return 0
    with new_directory(arguments.out) as temporary:
        refused = make_roster(temporary, archive=archive, settings=settings, model=arguments.model, keys=arguments.keys)
    for reason in refused.values():
        log.warning("round %d: no keys: %s", arguments.round, reason)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

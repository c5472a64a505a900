"""What the commands of a round that run on the login node have in common: their options, and how they end."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from facility.exchange.errors import CrossFedError
from facility.exchange.files.durable import new_directory
from facility.exchange.logs import add_log_options
from facility.exchange.messages import report
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.settings import read_facility_settings
from facility.rounds.replaced import check_replaced

log = logging.getLogger(__name__)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Settings, dataset (which says where the state is), round, output, state."""
    add = p.add_argument
    add("--settings", type=Path, required=True, metavar="FILE", help="the facility's settings (JSON)")
    add("--dataset", required=True, metavar="PATH", help="the prepared dataset; as in `facility.round`")
    add("--round", type=int, required=True, metavar="N", help="number of the round, from 0")
    add("--out", type=Path, required=True, metavar="DIR", help="what is sent, or failure.json alone; must not exist")
    add("--state", type=Path, metavar="DIR", help="what is kept between rounds (default: as in `facility.round`)")
    add_log_options(p)


def run_to_outcome(work: Callable[[], None], settings: Path, round: int, out: Path) -> int:
    """Run `work`; a failure becomes `failure.json` and the code that the workflow knows.

    Raises `InputError` where something else lies at `out`.
    """
    check_replaced(out)
    try:
        work()
        return Outcome.DONE
    except CrossFedError as error:
        reason = str(error)
    except Exception as error:  # a fault of ours must not hang the workflow either
        reason = f"the command failed: {report.text_of(error)}"
    log.error("%s", reason)
    try:
        facility = read_facility_settings(settings).facility
    except CrossFedError:
        facility = "?"
    shutil.rmtree(out, ignore_errors=True)
    with new_directory(out) as temporary:
        report.write(temporary, report.Failure(facility=facility, round=round, reason=reason))
    return Outcome.SKIPPED

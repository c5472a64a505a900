"""`crossfed conformance MODULE`: a trainer is tried as a facility runs it, then its updates are verified as usual."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coordinator.aggregation.verify import check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import CrossFedError
from facility.exchange.messages.manifest import read_manifest

FACILITY = "here"
"""Name of the trial's facility."""
ROUNDS = (("first", "model"), ("second", "next"))
"""Of each round of the trial: the folder of its job, and of the model that it received."""


def check_conformance(arguments: Sequence[str]) -> int:
    """Run `python -m facility.conformance` with these arguments, then verify its updates; returns the exit code."""
    given, _ = _parser().parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="crossfed-conformance-") as folder:
        kept = given.keep or Path(folder) / "trial"
        command = [sys.executable, "-m", "facility.conformance", *arguments]
        if given.keep is None:
            command += ["--keep", str(kept)]
        code = subprocess.run(command, check=False).returncode
        if code or given.help:
            return code
        refusals = refused_updates(kept)
    for refusal in refusals:
        print(refusal, file=sys.stderr)
    if not refusals and not given.json:
        print("and the coordinator accepts its updates")
    return int(bool(refusals))


def _parser() -> argparse.ArgumentParser:
    """Of the arguments of `facility.conformance` those that matter here, read as it reads them."""
    parser = argparse.ArgumentParser(prog="crossfed conformance", add_help=False, usage="%(prog)s [options] MODULE")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path)
    return parser


def refused_updates(kept: Path) -> list[str]:
    """Why the coordinator refuses the trial's updates, by the verification of every round; empty: it accepts them."""
    found = []
    for number, (job, model) in enumerate(ROUNDS):
        try:
            base = open_checkpoint(kept / model)
            check_update(kept / job / "update", base, read_manifest(kept / model), FACILITY, number)
        except CrossFedError as error:
            found.append(f"the coordinator refuses the update of round {number}: {error}")
    return found

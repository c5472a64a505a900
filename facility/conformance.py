"""Does a trainer of your own keep the contract of `facility.train`?

Runs the module as a facility's job would, on a pico model and a pico dataset: two rounds, the first one twice and once
more with SIGTERM in the middle, the evaluation of the final model, and models that must be refused. Each law is printed
with what was found; the exit code is 0 where none is broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from facility.conforming.laws import check_laws
from facility.conforming.trial import Trial
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.logs import add_log_options


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m facility.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("module", metavar="MODULE", help="the trainer, as trainer.module of federation.yml names it")
    p.add_argument("--ranks", type=int, default=1, metavar="N", help="processes of a round (default 1)")
    p.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS", help="longest time of a round (default 600)"
    )
    p.add_argument("--json", action="store_true", help="print the findings as JSON")
    p.add_argument("--keep", type=Path, metavar="DIR", help="make this folder and leave models and updates in it")
    add_log_options(p)
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(parser(), argv)
    found = []
    with ExitStack() as stack:
        if arguments.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossfed-conformance-")))
        else:
            folder = arguments.keep.absolute()
            if folder.exists():
                raise InputError(f"--keep {folder} exists already; remove it or choose another name")
        for finding in check_laws(
            Trial(folder, arguments.module, ranks=arguments.ranks, limit_seconds=arguments.limit)
        ):
            found.append(finding)
            if not arguments.json:
                print(finding.line, flush=True)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    broken = sum(not finding.kept for finding in found)
    if not arguments.json:
        print(f"{arguments.module} {f'breaks {broken} of {len(found)} laws' if broken else 'keeps the contract'}")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))

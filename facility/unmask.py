"""Answer once, after the deadline, so that the sum of a round can be unmasked; run on the login node, without a queue.

    python -m facility.unmask --request DIR --settings FILE --dataset PATH --round N --out DIR

Gives away, for each facility whose update arrived, a share of the seed of its own mask, and, for each that left none,
shares of the seeds that the others have in common with it; never both for one facility and round. What is answered is
noted durably first. Ends with 0, or with 7 and the reason in `--out`/failure.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.errors import ConfigurationError, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.unmasking import read_request, write_answer
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.masking.answering import answer_request
from facility.masking.site_rules import site_rules
from facility.rounds.kept import state_directory
from facility.rounds.login_command import add_arguments, run_to_outcome


def unmask(settings: FacilitySettings, request: Path, state: Path, out: Path) -> None:
    """Write this facility's signed answer to `out`. Raises `CrossFedError`."""
    if settings.masking is None:
        raise ConfigurationError("the settings ask for no secure aggregation")
    if not read_request(request).survivors:
        raise ConfigurationError("nothing is asked for: the round has no sum, or is repeated")
    answer = answer_request(
        request,
        facility=settings.facility,
        settings=settings.masking,
        state=state,
        rules=site_rules(),
    )
    with new_directory(out) as temporary:
        write_answer(temporary, answer, resolve_path(settings.training.signing_key))


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    p = argparse.ArgumentParser(prog="python -m facility.unmask", description=__doc__.splitlines()[0])
    p.add_argument("--request", type=Path, required=True, metavar="DIR", help="whose updates arrived, and their shares")
    add_arguments(p)
    a = p.parse_args(argv)

    def work() -> None:
        settings, dataset = read_facility_settings(a.settings), resolve_path(a.dataset)
        unmask(settings, a.request, state_directory(a.state, settings, dataset), a.out)

    return run_to_outcome(work, a.settings, a.round, a.out)


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

"""Draw this facility's keys for the secure aggregation of one round; run on the login node, without a queue.

    python -m facility.keys --settings FILE --dataset PATH --round N --out DIR

`--out` holds the public key, signed; the private one stays below the state directory. Ends with 0, or with 7 and the
reason in `--out`/failure.json, as `facility.round` does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from facility.dataset import open_dataset
from facility.exchange.errors import ConfigurationError, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.roster import Keys, write_keys
from facility.exchange.masking.walks import decisive_digest, sequences_of, walk_of
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.masking.private_keys import PrivateKeys
from facility.masking.site_rules import site_rules
from facility.rounds.kept import state_directory
from facility.rounds.login_command import add_arguments, run_to_outcome


def draw_keys(settings: FacilitySettings, dataset: Path, state: Path, round: int, out: Path) -> None:
    """Write signed keys of `round` to `out`. Raises `CrossFedError`."""
    training = settings.training
    if settings.masking is not None:
        site_rules().check(settings.masking)
    if settings.masking is None or not training.signing_key:
        raise ConfigurationError("the settings ask for no secure aggregation, or name no training.signing_key")
    sequences = sequences_of(training)
    block_tokens = open_dataset(dataset).manifest.block_tokens
    generation, public_key = PrivateKeys(state=state).draw(round)
    keys = Keys(
        federation=settings.federation,
        facility=settings.facility,
        round=round,
        generation=generation,
        public_key=public_key,
        steps=training.steps,
        samples=sequences,
        tokens=sequences * block_tokens,
        walk=walk_of(settings),
        told=decisive_digest(settings, dataset),
    )
    with tempfile.TemporaryDirectory(prefix="crossfed-keys-") as private:  # a coordinator may write where `out` is
        write_keys(Path(private), keys, resolve_path(training.signing_key))
        with new_directory(out) as temporary:
            for path in Path(private).iterdir():
                shutil.copyfile(path, temporary / path.name)


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    p = argparse.ArgumentParser(prog="python -m facility.keys", description=__doc__.splitlines()[0])
    add_arguments(p)
    a = p.parse_args(argv)

    def work() -> None:
        settings, dataset = read_facility_settings(a.settings), resolve_path(a.dataset)
        if a.round >= settings.rounds:
            raise ConfigurationError("the final evaluation needs no keys")
        draw_keys(settings, dataset, state_directory(a.state, settings, dataset), a.round, a.out)

    return run_to_outcome(work, a.settings, a.round, a.out)


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))

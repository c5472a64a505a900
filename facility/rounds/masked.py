"""The masked form of a finished update, made inside the training job and kept beside it.

The same update asked for under the same roster is the same directory again, to the byte; under a new roster it is
masked anew. What fixed point leaves of it goes into the next round's first weights, as with encoded updates.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve
from facility.exchange.masking.roster import check_size, read_roster
from facility.exchange.masking.walks import check_own, check_walks
from facility.exchange.messages.manifest import read_manifest, run_of, with_run
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.signatures import sign
from facility.exchange.messages.steps import steps_asked
from facility.masking.mask_update import check_base, mask_update
from facility.masking.private_keys import Member, PrivateKeys
from facility.masking.site_rules import site_rules
from facility.rounds.finished import Finished
from facility.rounds.smaller import keep_residual, residual_path

log = logging.getLogger(__name__)

FOLDER = "masking"


@dataclass(frozen=True, kw_only=True)
class Masked:
    """Masks the updates of one facility in one round."""

    settings: FacilitySettings
    state: Path
    member: Member

    def make(self, update: Path, *, received: Path, key: str, out: Path) -> None:
        """Write to `out` what travels in place of the finished `update`; `key`: what the update depends on."""
        masking, round = self.settings.masking, self.member.roster.agreement.round
        assert masking is not None
        kept = Finished(self.state / FOLDER)
        own_key = hashlib.sha256(f"{key}\n{self.member.roster.digest}".encode()).hexdigest()
        if (found := kept.find(own_key, round)) is not None:
            log.info("the update was masked under this roster before; it is sent again")
            link_tree(found, out)
            return
        residual = residual_path(self.state, round)
        shutil.rmtree(residual, ignore_errors=True)
        _, left = mask_update(
            update, received=received, out=out, residual_out=residual, member=self.member, settings=masking
        )
        keep_residual(self.state, round, left)
        with_run(out, run_of(read_manifest(received)))
        sign(out, resolve(self.settings.training.signing_key))
        kept.keep(own_key, round, out)


def unmasked_path(state: Path, round: int) -> Path:
    """Where training leaves an update that is to be masked, until it is kept as finished."""
    return state / FOLDER / f"unmasked-{round}"


def masked(settings: FacilitySettings, state: Path, roster: Path | None, received: Path, round: int) -> Masked | None:
    """How this round's update is masked; None where it is not. Raises `InputError`, before anything is trained."""
    if settings.masking is None or round >= settings.rounds:
        return None
    if roster is None:
        raise ConfigurationError("the settings ask for secure aggregation, but no --roster was given: render again")
    rules = site_rules()
    rules.check(settings.masking)
    found = read_roster(roster, settings.masking, resolve(settings.masking.peer_signers))
    check_size(found, settings.masking, rules.least(settings.masking))
    member = PrivateKeys(state=state).of(found, settings.facility)
    asked = steps_asked(read_manifest(received), settings.facility, most=settings.most_steps)
    check_own(found.keys[settings.facility], settings, asked or 0)
    check_walks(found, settings.facility)
    check_base(found, received)
    return Masked(settings=settings, state=state, member=member)

"""The masked form of a finished update, made inside the training job and kept beside it.

The same update asked for under the same roster is the same directory again, to the byte; under a new roster it is
masked anew. What fixed point leaves of it goes into the next round's first weights, as with encoded updates.

The trainer may have masked the update from memory already (`facility.rounds.held`): then the finished update has no
weights. Under a new roster they are computed from what was masked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_files, link_tree
from facility.exchange.files.paths import resolve_path
from facility.exchange.masking.roster import check_size, read_roster
from facility.exchange.masking.walks import check_own, check_walks
from facility.exchange.messages.manifest import read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.report import Report, read_report, skipped_of
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.steps import steps_asked
from facility.masking.ledger import AnswerLedger
from facility.masking.mask_update import check_base, complete_masked_update, mask_update
from facility.masking.private_keys import Member, PrivateKeys
from facility.masking.request_copy import private_roster
from facility.masking.site_rules import site_rules
from facility.rounds.finished import Finished
from facility.rounds.held import drop_held, is_held, keep_rest, read_held, take_off, write_held
from facility.rounds.signing import sign_update
from facility.rounds.smaller import drop_pending, keep_residual, residual_path

log = logging.getLogger(__name__)

FOLDER = "masking"
MOST_SKIPPED = 1 / 16
"""Share of a round's steps that may have moved nothing. A coordinator chooses model and precision: with `float16` for
all facilities but one, a model can make the others' gradients overflow."""


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
        check_steps(read_report(update))
        if is_held(update) and not self._send_held(update, received, out):
            update = self._whole_again(update, received, key)
        if not is_held(update):
            drop_held(self.state)
            drop_pending(self.state)
            residual = residual_path(self.state, round)
            shutil.rmtree(residual, ignore_errors=True)
            _, left = mask_update(
                update,
                received=received,
                out=out,
                residual_out=residual,
                member=self.member,
                settings=masking,
                seed=self.settings.seed,
            )
            keep_residual(self.state, round, left)
        with_run(out, run_of(read_manifest(received)))
        sign_update(out, self.settings, round)
        kept.keep(own_key, round, out)

    def hold(self, update: Checkpoint, *, received: Path) -> None:
        """Mask an `update` that is in memory; what travels stays in the state until `make` sends it."""
        assert self.settings.masking is not None
        round = self.member.roster.agreement.round
        masking, seed = self.settings.masking, self.settings.seed
        write_held(self.state, round, update, received, member=self.member, settings=masking, seed=seed)

    def can_make(self, update: Path) -> bool:
        """Whether the finished `update` is here, whole or masked."""
        return not is_held(update) or read_held(self.state, self.member.roster.agreement.round, verify=True) is not None

    def _send_held(self, update: Path, received: Path, out: Path) -> bool:
        """Send what was masked from memory; False where that was under another roster. Raises `InputError`."""
        assert self.settings.masking is not None
        held = read_held(self.state, self.member.roster.agreement.round)
        if held is None:
            raise InputError(f"{update} has no weights, and what was masked of them is not here: run the round again")
        if held.roster != self.member.roster.digest:
            return False
        keep_rest(self.state, held)
        with new_directory(out) as directory:
            link_files(held.sent, directory)
            complete_masked_update(
                update, received, directory, held.masked, member=self.member, settings=self.settings.masking
            )
        return True

    def _whole_again(self, update: Path, received: Path, key: str) -> Path:
        """The finished update with its weights, from what was masked under another roster; it is kept as finished."""
        round = self.member.roster.agreement.round
        held = read_held(self.state, round, verify=True)
        if held is None:
            raise InputError(f"{update} has no weights, and what was masked of them is damaged: run the round again")
        log.info("the update was masked under another roster before: its masks are taken off, and it is masked anew")
        whole, finished = unmasked_path(self.state, round), Finished(self.state)
        shutil.rmtree(whole, ignore_errors=True)
        with new_directory(whole) as directory:
            tensors = take_off(self.state, held, open_checkpoint(received), directory)
            copy_companions(update, directory, leave=())
            manifest = dataclasses.replace(read_manifest(update), files={}, dtypes={"F32": tensors})
            write_manifest(directory, manifest)
        finished.keep(key, round, whole)
        shutil.rmtree(whole)
        return finished.place(round)


def check_steps(report: Report) -> None:
    """Raise `InputError` where more than `MOST_SKIPPED` of the steps moved nothing."""
    if (skipped := skipped_of(report)) > MOST_SKIPPED * report.steps:
        raise InputError(
            f"{skipped} of the {report.steps} steps were skipped, for a loss or gradient was not finite; expected "
            f"{MOST_SKIPPED:.0%} at most under masks: of a sum in which others moved next to nothing, the rest is one "
            "facility's. Nothing is masked; another compute_dtype or a lower learning_rate is needed"
        )


def unmasked_path(state: Path, round: int) -> Path:
    """Where training leaves an update that is to be masked, until it is kept as finished."""
    return state / FOLDER / f"unmasked-{round}"


def read_masking(
    settings: FacilitySettings, state: Path, roster: Path | None, received: Path, round: int, *, dataset: Path
) -> Masked | None:
    """How this round's update is masked; None where it is not. Raises `InputError`, before anything is trained."""
    if settings.masking is None or round >= settings.rounds:
        return None
    if roster is None:
        raise ConfigurationError("the settings ask for secure aggregation, but no --roster was given: render again")
    rules = site_rules()
    rules.check(settings.masking)
    with private_roster(roster) as copy:  # where the roster lies, its keys can be exchanged once they are checked
        found = read_roster(copy, settings.masking, resolve_path(settings.masking.peer_signers))
    check_size(found, settings.masking, rules.least(settings.masking))
    member = PrivateKeys(state=state).of(found, settings.facility)
    asked = steps_asked(read_manifest(received), settings.facility, most=settings.most_steps)
    check_own(found.keys[settings.facility], settings, dataset, asked or 0)
    check_walks(found, settings.facility)
    check_base(found, received)
    AnswerLedger(state=state).check(found, settings.masking)
    return Masked(settings=settings, state=state, member=member)

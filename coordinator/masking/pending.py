"""The request of the round under way, kept with the masked updates that it is for until the round is in the archive.

    ARCHIVE/unmasking/round-0003/request/        what the facilities are asked for
    ARCHIVE/unmasking/round-0003/updates/NAME/

Facilities answer for one set of survivors a round. Once there is a request, a coordinator that was killed, or that got
too few answers, asks for the same again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.archive.rounds import Archive
from facility.exchange.files import present
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_tree
from facility.exchange.masking.roster import base_of, read_agreement
from facility.exchange.masking.shares import NAME as SHARES_FILE
from facility.exchange.masking.unmasking import ROSTER, SHARES, UnmaskRequest, shares_path, write_request

FOLDER = "unmasking"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Access to the pending request of one round."""

    archive: Archive
    round: int

    @property
    def directory(self) -> Path:
        return self.archive.path / FOLDER / f"round-{self.round:04d}"

    @property
    def request(self) -> Path:
        return self.directory / "request"

    def update(self, facility: str) -> Path:
        """The masked update of a survivor."""
        return self.directory / "updates" / facility

    def find(self, model: Path) -> bool:
        """Whether there is a request for the round that `model` begins; one for another model is removed."""
        if not present.exists(self.directory):
            return False
        agreement = read_agreement(self.request / ROSTER)
        if (agreement.run, agreement.base_sha256, agreement.round) == base_of(model):
            return True
        self.forget()
        return False

    def forget(self) -> None:
        """Remove this request alone."""
        shutil.rmtree(self.directory)

    def write(self, request: UnmaskRequest, roster: Path, updates: Mapping[str, Path]) -> None:
        """Keep a request and its updates, atomically."""
        with new_directory(self.directory) as temporary:
            (temporary / "updates").mkdir()
            for name in request.survivors:
                link_tree(updates[name], temporary / "updates" / name)
            write_request_directory(temporary / "request", request, roster, updates)

    def drop(self) -> None:
        """Forget all requests: the round is complete."""
        shutil.rmtree(self.archive.path / FOLDER, ignore_errors=True)


def forget_complete(archive: Archive, following: int) -> None:
    """Remove requests of rounds before `following`, which are in the archive: their coordinator was killed between."""
    for path in (archive.path / FOLDER).glob("round-*"):
        if (number := path.name.removeprefix("round-")).isdigit() and int(number) < following:
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # another one is pending, or there is none
        (archive.path / FOLDER).rmdir()


def write_request_directory(directory: Path, request: UnmaskRequest, roster: Path, updates: Mapping[str, Path]) -> None:
    """Write what is sent to every facility; `updates`: of the survivors at least."""
    directory.mkdir()
    write_request(directory, request)
    link_tree(roster, directory / ROSTER)
    (directory / SHARES).mkdir()
    for name in request.survivors:
        shutil.copyfile(updates[name] / SHARES_FILE, shares_path(directory, name))

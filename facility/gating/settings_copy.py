"""A settings file as a request's command reads it: a copy that the coordinator cannot alter between check and use.

A short command is given a copy that lasts as long as the request. A job reads its settings when it starts, and its
ranks once more; so those of an approved order are kept, by their digest.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import CrossFedError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.files.durable import write_bytes
from facility.exchange.messages.settings import MOST_BYTES, FacilitySettings, read_facility_settings
from facility.gating.ledger import ledger_locked, read_ledger
from facility.gating.refusal import Refused
from facility.gating.session import Session

FOLDER = "settings"
"""Below the gate's own directory: the settings of signed orders, as the ledger names them."""


@dataclass(kw_only=True)
class SettingsCopy:
    """A file below the gate's own directory, removed when the request ends."""

    path: Path
    digest: str = ""
    """Of the content that was taken."""

    def take(self, source: Path) -> None:
        """Copy a file. Raises `Refused` where it cannot be read or is too large."""
        try:
            content = read_bounded(source, MOST_BYTES)
        except OSError as error:
            raise Refused(f"the settings cannot be read: {error.strerror}") from None
        self.write(content)

    def write(self, content: bytes) -> None:
        """Raises `Refused` where it is too large."""
        if len(content) > MOST_BYTES:
            raise Refused(f"the settings have more than {MOST_BYTES} bytes")
        self.path.write_bytes(content)
        self.digest = hashlib.sha256(content).hexdigest()

    def read(self, session: Session) -> FacilitySettings:
        """The settings, where they are this facility's in a federation of the policy's. Raises `Refused`."""
        try:
            settings = read_facility_settings(self.path)
        except (CrossFedError, ValueError) as error:
            raise Refused(str(error)) from None
        policy = session.policy
        if settings.federation not in policy.federations or settings.facility != policy.facility:
            raise Refused(
                f"the settings are for {settings.facility!r} in federation {settings.federation!r}; the policy allows "
                f"{policy.facility!r} in {', '.join(policy.federations)}"
            )
        return settings

    def check_ordered(self, session: Session) -> None:
        """Raise `Refused` unless a model that was signed, and came through this gate, named these settings."""
        if self.digest not in read_ledger(session.ledger).settings:
            raise Refused("no signed order that came through this gate names these settings")

    def keep(self, session: Session) -> Path:
        """Note that a signed order named these settings; returns where its job reads them. Forgets the oldest."""
        place = session.state / FOLDER
        place.mkdir(mode=0o700, exist_ok=True)
        kept = place / f"{self.digest}.json"
        with ledger_locked(session.ledger) as (ledger, _):
            write_bytes(kept, self.path.read_bytes(), mode=0o600)
            ledger.settings = [*(one for one in ledger.settings if one != self.digest), self.digest]
            for path in place.iterdir():
                if path.stem not in ledger.settings:
                    path.unlink()
        return kept


@contextmanager
def settings_copy(session: Session) -> Iterator[SettingsCopy]:
    """An empty copy, to be taken."""
    with tempfile.NamedTemporaryFile(dir=session.state, prefix="settings-", suffix=".json") as file:
        yield SettingsCopy(path=Path(file.name))

"""The two commands of secure aggregation that need no queue, run on this host: `keys` and `unmask`.

Keys say nothing of the data, so settings that no order has named yet are held against the policy alone. An answer needs
settings that a signed order named. Both are given a copy of the settings that the coordinator cannot alter.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from facility.exchange.errors import CrossFedError
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.gating import queue
from facility.gating.approval import check_dataset, check_masking, check_names
from facility.gating.confine import below, confined
from facility.gating.grammar import Request
from facility.gating.jobs import COMMAND, leave_reason, line, masking_exports, template
from facility.gating.ledger import JobEntry, changed, read_ledger
from facility.gating.refusal import Refused
from facility.gating.session import Session

SECONDS = 600.0
"""Time limit."""
MOST_BYTES = 1 << 20
"""Of a settings file."""


def keys(session: Session, request: Request) -> int:
    """Draw this facility's keys for a round (`facility.keys`)."""
    return _run(session, request, ["facility.keys"], ordered=False)


def unmask(session: Session, request: Request) -> int:
    """Answer a request to unmask a round's sum (`facility.unmask`)."""
    asked = confined(request["request"], session.workdir, follow=True)
    return _run(session, request, ["facility.unmask", "--request", str(asked)], ordered=True)


def _run(session: Session, request: Request, command: Sequence[str], *, ordered: bool) -> int:
    directory = below(request["directory"], session.workdir)
    below(request["temporary"], session.workdir)
    update = directory / "update"
    if not directory.is_dir() or directory.is_symlink() or update.exists() or update.is_symlink():
        raise Refused(f"{directory} is no new directory for {request.verb}")
    with tempfile.NamedTemporaryFile(dir=session.state, prefix="settings-", suffix=".json") as copy:
        try:
            content = _content(confined(request["settings"], session.workdir, follow=True))
            copy.write(content)
            copy.flush()
            digest = hashlib.sha256(content).hexdigest()
            settings = _checked(session, Path(copy.name), digest, ordered=ordered)
            dataset = check_dataset(session, request["dataset"])
            _count(session)
        except Refused as error:
            leave_reason(session, directory, int(request["round"]), str(error))
            raise
        name = f"crossfed-{settings.federation}-{settings.facility}"
        with changed(session.ledger) as (ledger, now):  # what it leaves may be read; it costs no node-hours
            ledger.jobs.append(JobEntry(id="", name=request.verb, directory=str(directory), submitted=now))
        session.write("login command", command=request.verb, round=int(request["round"]), settings=digest)
        words = ["python3", "-m", *command, "--out", "update", "--settings", copy.name, "--dataset", str(dataset)]
        text = line(session, [*words, "--round", request["round"]], masking_exports(session), directory)
        script = template(session, login=True).replace(COMMAND, text)
        return queue.on_this_host(session, script, name, directory, seconds=SECONDS)


def _content(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise Refused(f"the settings cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise Refused(f"the settings are larger than {MOST_BYTES} bytes")
    return content


def _checked(session: Session, copy: Path, digest: str, *, ordered: bool) -> FacilitySettings:
    """The settings, once they are found to be within the policy. Raises `Refused`."""
    try:
        settings = read_facility_settings(copy)
    except (CrossFedError, ValueError) as error:
        raise Refused(str(error)) from None
    check_names(session, settings)
    if settings.masking is None:
        raise Refused("the settings ask for no secure aggregation")
    check_masking(session, settings.masking)
    if ordered and digest not in read_ledger(session.ledger).settings:
        raise Refused("no signed order that came through this gate names these settings")
    return settings


def _count(session: Session) -> None:
    most = session.policy.login_commands_per_day
    with changed(session.ledger) as (ledger, now):
        if (count := ledger.count_command(now)) > most:
            raise Refused(f"{count} commands within 24 hours, the policy's login_commands_per_day is {most}")

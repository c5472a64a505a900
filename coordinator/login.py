"""`crossfed login`: renew a facility's login by the site's own command, then try it."""

from __future__ import annotations

import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

from coordinator.config.federation import Federation
from coordinator.config.firecrest import FIRECREST
from coordinator.engine.place import login_place
from coordinator.preflight.firecrest import check_firecrest
from coordinator.preflight.gate import check_gate
from coordinator.preflight.remote import check_connection
from coordinator.preflight.row import Row, fail
from facility.exchange.errors import InputError
from facility.exchange.files.storage import make_private_folder


def log_in(federation: Federation, facility: str) -> Row:
    """Run `deployment.renew` on this terminal, then test the login. Raises `InputError` for an unknown facility."""
    members = {one.name: one for one in federation.facilities}
    if facility not in members:
        raise InputError(f"{facility!r} is not a facility of this federation, expected one of {', '.join(members)}")
    member = members[facility]
    deployment = member.deployment
    if deployment.renew:
        try:
            code = subprocess.run(shlex.split(deployment.renew)).returncode
        except OSError as error:
            return fail(facility, "renew", f"`{deployment.renew}` cannot be run: {error}", "correct `renew:`")
        if code:
            return fail(
                facility, "renew", f"`{deployment.renew}` ended with code {code}", "give the same command again"
            )
    if deployment.type == FIRECREST:
        row = check_firecrest(member, "")[0]
    elif deployment.gate:
        row = check_gate(federation, member, link=False)[0]
    else:
        row = check_connection(facility, deployment)
    if row.verdict == "ok":
        _leave_word(login_place(federation.workdir_path), facility)
    return row


def _leave_word(folder: Path, facility: str) -> None:
    """Without it, a waiting run tries again at the end of its pause."""
    with suppress(OSError):
        make_private_folder(make_private_folder(folder.parent) / folder.name)
        (folder / facility).touch(mode=0o600)

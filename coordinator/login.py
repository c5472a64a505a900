"""`crossfed login`: renew a facility's login by the site's own command, then try it."""

from __future__ import annotations

import shlex
import subprocess

from coordinator.config.federation import Federation
from coordinator.preflight.gate import check_gate
from coordinator.preflight.remote import check_connection
from coordinator.preflight.row import Row, fail
from facility.exchange.errors import InputError


def log_in(federation: Federation, facility: str) -> Row:
    """Run `deployment.renew` on this terminal, then test the login. Raises `InputError` for an unknown facility."""
    found = {one.name: one.deployment for one in federation.facilities}
    if facility not in found:
        raise InputError(f"{facility!r} is no facility of this federation, expected one of {', '.join(found)}")
    deployment = found[facility]
    if deployment.renew:
        try:
            code = subprocess.run(shlex.split(deployment.renew)).returncode
        except OSError as error:
            return fail(facility, "renew", f"`{deployment.renew}` cannot be run: {error}", "correct `renew:`")
        if code:
            return fail(
                facility, "renew", f"`{deployment.renew}` ended with code {code}", "give the same command again"
            )
    if deployment.gate:
        member = next(one for one in federation.facilities if one.name == facility)
        return check_gate(federation, member, link=False)[0]
    return check_connection(facility, deployment)

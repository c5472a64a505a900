"""Names of a facility's deployments in streamflow.yml.

Its steps are bound to `facility-NAME`. Where that is a queue, the connection that it wraps is `facility-NAME-ssh`, or
`facility-NAME-api` for FirecREST; commands on a login node that is this machine have `facility-NAME-login`.
"""

from __future__ import annotations

FACILITY = "facility-"
"""Prefix of facilities' deployment names in streamflow.yml, and of no others: data from these is not trusted."""
CONNECTION, INTERFACE, LOGIN_NODE = "-ssh", "-api", "-login"
"""What the name of a further deployment of a facility ends in."""


def deployment_name(facility: str, ending: str = "") -> str:
    """The deployment that a facility's steps are bound to; with an `ending`, one that belongs to it."""
    return f"{FACILITY}{facility}{ending}"


def is_facility(deployment: str) -> bool:
    """True for the deployments of facilities, as `crossfed render` names them; also for those on this machine."""
    return deployment.startswith(FACILITY)


def facility_of_deployment(deployment: str, ending: str = "") -> str:
    """The inverse of `deployment_name`. A facility's own name may end in what an `ending` is."""
    return deployment.removeprefix(FACILITY).removesuffix(ending)

"""Checks of a facility behind FirecREST: the client is let in, the system is there, and the work directory too."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from coordinator.config.federation import Facility
from coordinator.preflight.row import Row, fail, ok, skipped, warning
from facility.exchange.messages.strict_json import clean


def check_firecrest(facility: Facility, template: str) -> list[Row]:
    """Rows of one facility. `template`: its filled job template."""
    name = facility.name
    if find_spec("firecrest") is None:
        return [fail(name, "connection", "pyfirecrest is not installed here", "pip install 'crossfed[firecrest]'")]
    systems, refusal = _ask(facility, lambda client: client.systems())
    if refusal:
        return [fail(name, "connection", *refusal), skipped(name, "everything else", "the facility cannot be reached")]
    rows = [ok(name, "connection", f"{facility.deployment.firecrest.url} takes the client")]
    return [*rows, _system(facility, systems or []), *_place(facility), _partition(facility, template), _unseen(name)]


def _ask(facility: Facility, act: Callable[[Any], Any]) -> tuple[Any, tuple[str, str] | None]:
    """An answer, or what was found and what to do."""
    import asyncssh

    from coordinator.streamflow_plugin.firecrest_client import Api, NotThere, Rejected, Unreachable

    access = facility.deployment.firecrest
    api = Api(
        url=access.url.rstrip("/"),
        system=access.system,
        token_url=access.token_url,
        client_id=access.client_id,
        secret_file=access.client_secret_file,
        account=access.account,
    )
    try:
        return api.call(act), None
    except OSError as error:
        if isinstance(error, Unreachable):
            return None, (f"{access.url}: {error}", "correct `firecrest.url`, or look at the network of this machine")
        return None, (f"{access.client_secret_file}: {error.strerror}", "name the file of the client's secret")
    except asyncssh.PermissionDenied as error:
        return None, (str(error), "is the client's secret still valid? the site's identity provider gives a new one")
    except (NotThere, Rejected) as error:
        return None, (str(error), "correct the `firecrest` section")


def _system(facility: Facility, systems: list[Any]) -> Row:
    wanted = facility.deployment.firecrest.system
    names = [clean(str(one.get("name")), 80) for one in systems if isinstance(one, dict)]
    if wanted not in names:
        return fail(
            facility.name,
            "system",
            f"there is no system {wanted!r}",
            f"correct `firecrest.system`; there are {', '.join(names) or 'none'}",
        )
    return ok(facility.name, "system", f"{wanted} is one of {len(names)}")


def _place(facility: Facility) -> list[Row]:
    """The facility's directories: where models go, and the dataset."""
    rows = []
    for what, path in (("workdir", facility.deployment.workdir), ("dataset", facility.dataset)):
        _, refusal = _ask(facility, lambda client, path=path: client.stat(facility.deployment.firecrest.system, path))  # type: ignore[misc]
        if refusal is None:
            rows.append(ok(facility.name, what, f"{path} is there"))
        elif what == "workdir":
            rows.append(warning(facility.name, what, f"{path}: {refusal[0]}", "it will be made; is its parent yours?"))
        else:
            rows.append(fail(facility.name, what, f"{path}: {refusal[0]}", "prepare the dataset there first"))
    return rows


def _partition(facility: Facility, template: str) -> Row:
    found = re.search(r"^#SBATCH\s+(?:--partition[= ]|-p ?)(\S+)", template, re.MULTILINE)
    if not found:
        return skipped(facility.name, "partition", "the template names none")
    listed, refusal = _ask(facility, lambda client: client.partitions(facility.deployment.firecrest.system))
    if refusal:
        return fail(facility.name, "partition", *refusal)
    names = [clean(str(one.get("name")), 80) for one in listed or [] if isinstance(one, dict)]
    if found[1] not in names:
        fix = f"correct `fill: {{partition: ...}}`; there are {', '.join(names) or 'none'}"
        return fail(facility.name, "partition", f"there is no partition {found[1]!r}", fix)
    return ok(facility.name, "partition", f"{found[1]} is there")


def _unseen(name: str) -> Row:
    return skipped(name, "environment", "FirecREST runs no commands; the first job shows it")

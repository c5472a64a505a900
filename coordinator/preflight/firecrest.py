"""Checks of a facility behind FirecREST: the client is let in, the system is there, and the work directory too."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from coordinator.config.federation import Facility
from coordinator.preflight.row import Row, fail, ok, skipped, warning
from coordinator.preflight.submission import CHECK, LOOK_SECONDS, OUTPUT, SECONDS
from coordinator.schedulers.firecrest import FINISHED, SCHEDULER, plain_job
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.messages.template_inheritance import script_of


def check_firecrest(facility: Facility, template: str, *, submit: bool = False) -> list[Row]:
    """Rows of one facility. `template`: its filled job template. `submit`: a job of one second, for FirecREST has no
    dry run."""
    name = facility.name
    if find_spec("firecrest") is None:
        return [fail(name, "connection", "pyfirecrest is not installed here", "pip install pyfirecrest")]
    systems, refusal = _ask(facility, lambda client: client.systems())
    if refusal:
        return [fail(name, "connection", *refusal), skipped(name, "everything else", "the facility cannot be reached")]
    rows = [ok(name, "connection", f"{facility.deployment.firecrest.url} takes the client")]
    rows += [_system(facility, systems or []), *_place(facility), _partition(facility, template)]
    if submit and not any(row.verdict == "fail" for row in rows):
        rows.append(_try_job(facility, template))
    return [*rows, _unseen(name)]


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
    names = [clean_text(str(one.get("name")), 80) for one in systems if isinstance(one, dict)]
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
    names = [clean_text(str(one.get("name")), 80) for one in listed or [] if isinstance(one, dict)]
    if found[1] not in names:
        fix = f"correct `fill: {{partition: ...}}`; there are {', '.join(names) or 'none'}"
        return fail(facility.name, "partition", f"there is no partition {found[1]!r}", fix)
    return ok(facility.name, "partition", f"{found[1]} is there")


def _try_job(facility: Facility, template: str) -> Row:
    """Submit the template with `sleep 1` in place of the training, and watch it for a minute."""
    name, system, place = facility.name, facility.deployment.firecrest.system, facility.deployment.workdir
    job = script_of(template, "sleep 1")
    script = SCHEDULER.named(job, f"crossfed-check-{name}", f"{place}/{OUTPUT}")

    def send(client: Any) -> Any:
        client.mkdir(system, place, create_parents=True)
        return client.submit(system, place, script_str=script)

    answer, refusal = _ask(facility, send)
    if refusal:
        return fail(name, CHECK, f"it is refused: {refusal[0]}", "correct the template; the words are the site's")
    id, deadline, job_now = str((answer or {}).get("jobId") or ""), time.monotonic() + SECONDS, None
    while time.monotonic() < deadline:
        found, _ = _ask(facility, lambda client: client.job_info(system, id))
        job_now = next((one for raw in found or [] if (one := plain_job(raw)) and one["id"] == id), job_now)
        if job_now is not None and job_now["state"] in SCHEDULER.terminal:
            good = job_now["state"] in ("COMPLETED", FINISHED) and not job_now["code"]
            end = f"job {id} ended: {job_now['state']}, exit code {job_now['code']}"
            return ok(name, CHECK, end) if good else fail(name, CHECK, end, f"look at {OUTPUT} in the work directory")
        time.sleep(LOOK_SECONDS)
    _ask(facility, lambda client: client.cancel_job(system, id))
    state = job_now["state"].lower() if job_now else "without a record"
    return ok(name, CHECK, f"taken as job {id}, {state} after {SECONDS:g} s; cancelled")


def _unseen(name: str) -> Row:
    return skipped(name, "environment", "FirecREST runs no commands; the first job shows it")

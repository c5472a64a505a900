"""What a federation.yml asks for, as flat plain data: a later start compares with it to find what has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.config.deployments import Deployment, job_template
from coordinator.config.federation import Facility, Federation
from facility.exchange.errors import ConfigurationError
from facility.exchange.hints import dataclass_at, field_default

Described = Mapping[str, Any]
"""`federation`: key -> value; `facilities`: name -> key -> value."""
LEFT_OUT = ("file", "name", "facilities", "training", "notify", "archive", "deprecated", "chosen")
"""Of a federation: what is described elsewhere, or is derived; another `name` or `archive` is another federation's."""
DEPLOYMENT = ("type", "template", "options", "gate", "workdir")
"""Of a deployment: how jobs are asked for, by value."""
QUEUEING = (
    *("max_jobs", "polling_seconds", "give_up_minutes", "connections", "sessions", "retries", "retry_seconds"),
    *("connect_seconds", "gpu_memory_gb", "ssh", "environment"),
)
"""Of a deployment: how its queue is asked, and where its Python is; by value where it is not the default."""
ACCESS = ("host", "user", "key", "passphrase_file", "tunnel", "transfer", "firecrest", "renew", "known_hosts")
"""Of a deployment: hosts, accounts and keys, which are written down in federation.yml alone; together as one digest."""
DIGESTS = ("deployment.access", "deployment.job_script", "notify")
"""Keys whose value is a digest."""


def describe_federation(federation: Federation) -> dict[str, Any]:
    """The same federation.yml and job templates give the same data on any machine."""
    own = {key.name: getattr(federation, key.name) for key in dataclasses.fields(federation)}
    values = {name: value for name, value in own.items() if name not in LEFT_OUT}
    values["notify"] = _digest(federation.notify)
    facilities = {one.name: dict(sorted(_flat(_of_facility(federation, one)))) for one in federation.facilities}
    return {"federation": dict(sorted(_flat(values))), "facilities": facilities}


def digest_of(data: Described) -> str:
    """The sha256 of a description, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def default_of(key: str) -> Any:
    """The default of a key of the federation, or of a facility's `training`, as it is described; None where it has
    none."""
    *above, name = key.split(".")
    holder = dataclass_at(Federation, above)
    for field in dataclasses.fields(holder) if holder is not None else ():
        if field.name == name:
            made = field_default(field)
            return None if made is dataclasses.MISSING else json.loads(json.dumps(_plain(made), default=str))
    return None


def _of_facility(federation: Federation, facility: Facility) -> dict[str, Any]:
    """What a facility has of its own is there where it is not the default."""
    deployment = facility.deployment
    defaults = Deployment()
    try:
        script = job_template(deployment, federation.file.parent)
    except ConfigurationError:  # rendering refuses it, at its line
        script = None
    return {
        "dataset": facility.dataset,
        "deployment": {name: getattr(deployment, name) for name in DEPLOYMENT}
        | {name: one for name in QUEUEING if (one := getattr(deployment, name)) != getattr(defaults, name)}
        | {"access": _digest({name: _plain(getattr(deployment, name)) for name in ACCESS})}
        | ({} if script is None else {"job_script": _digest(script)}),
        "training": facility.training,
        **_given(facility, "trainer", "submit_ahead", "public", "peer_signers"),
    }


def _given(facility: Facility, *names: str) -> dict[str, Any]:
    """Fields `names` of a facility that differ from their defaults."""
    defaults = Facility(name=facility.name, dataset=facility.dataset)
    return {name: one for name in names if (one := getattr(facility, name)) != getattr(defaults, name)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True, default=str).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Key and plain value of every leaf."""
    value = _plain(value)
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _flat(one, f"{above}.{name}" if above else str(name))
    elif above:
        yield above, json.loads(json.dumps(value, default=_in_a_list))


def _in_a_list(value: Any) -> Any:
    """What JSON has no word for, as a value of it: the keys of such as `creators`, else its text."""
    return _plain(value) if dataclasses.is_dataclass(value) else str(value)

"""What a federation.yml asks for, as flat plain data: what a later start compares with, to tell what has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.config.federation import Facility, Federation

Described = Mapping[str, Any]
"""`federation`: key -> value; `facilities`: name -> key -> value."""
LEFT_OUT = ("file", "name", "facilities", "training", "notify", "archive", "workdir", "deprecated", "chosen", "title")
"""Of a federation: what is described elsewhere, or says nothing about its rounds."""
DEPLOYMENT = ("type", "template", "options", "gate", "workdir")
"""Of a deployment: how jobs are asked for. Hosts, accounts and keys are written down in federation.yml alone."""


def described(federation: Federation) -> dict[str, Any]:
    """The same federation.yml gives the same data on any machine."""
    own = {key.name: getattr(federation, key.name) for key in dataclasses.fields(federation)}
    values = {name: value for name, value in own.items() if name not in LEFT_OUT}
    facilities = {one.name: dict(sorted(_flat(_of_facility(one)))) for one in federation.facilities}
    return {"federation": dict(sorted(_flat(values))), "facilities": facilities}


def digest_of(data: Described) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _of_facility(facility: Facility) -> dict[str, Any]:
    return {
        "dataset": facility.dataset,
        "deployment": {name: getattr(facility.deployment, name) for name in DEPLOYMENT},
        "training": facility.training,
    }


def _flat(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Key and plain value of every leaf."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping) and value:
        for name, one in value.items():
            yield from _flat(one, f"{above}.{name}" if above else str(name))
    elif above:
        yield above, json.loads(json.dumps(value, default=str))

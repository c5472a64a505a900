"""`submit_ahead:` in federation.yml: a facility's next job is in its queue before the round that it is for begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from coordinator.config.deployments import QUEUES, Deployment
from coordinator.config.firecrest import FIRECREST
from facility.exchange.errors import ConfigurationError
from facility.exchange.validation import NonNegative, Share, validated


@validated(frozen=True, kw_only=True)
class AheadSettings:
    """A job that begins before its model has come waits for it; the node-hours that this costs are counted."""

    wait: NonNegative[float] = 300.0
    """Most seconds that a job which has begun waits for its model; then it ends. They count against the job's time
    limit. 0: it ends at once."""
    then: Literal["again", "leave"] = "again"
    """After a job that ended without its model: submit another at once (`again`), or the next one with its model
    (`leave`)."""
    idle: Share = 0.05
    """Jobs are submitted so late that waiting in them is expected to cost at most this share of the node-hours of
    training, by what the queue and the rounds took before."""


def _switched(value: Any) -> Any:
    """`true` is the defaults."""
    return {} if value is True else value


def _switched_off(value: Any) -> Any:
    return None if value is False else _switched(value)


OfFederation = Annotated[
    AheadSettings | None, BeforeValidator(_switched_off, json_schema_input_type=bool | AheadSettings)
]
"""What `submit_ahead` of the federation may be: `true`, `false` or a mapping."""
OfFacility = Annotated[
    AheadSettings | Literal[False] | None, BeforeValidator(_switched, json_schema_input_type=bool | AheadSettings)
]
"""What `submit_ahead` of a facility may be; None: what the federation has."""


def ahead_of(
    federation: AheadSettings | None,
    facilities: Sequence[tuple[str, Deployment, AheadSettings | Literal[False] | None]],
) -> Mapping[str, AheadSettings]:
    """Who submits ahead, and how. Raises `ConfigurationError`, with the key, where that cannot work.

    `facilities`: name, deployment and own setting of each.
    """
    found = {}
    for number, (name, deployment, own) in enumerate(facilities):
        settings = federation if own is None else own or None
        if settings is None:
            continue
        key = f"facilities[{number}].submit_ahead" if own is not None else "submit_ahead"
        if reason := why_not_ahead(deployment):
            remedy = "remove it" if own is not None else f"set `submit_ahead: false` at facility {name!r}"
            raise ConfigurationError(f"submit_ahead is set, but {reason}; {remedy}", key=key)
        if deployment.type in QUEUES:
            found[name] = settings
        elif own is not None:
            raise ConfigurationError(
                f"submit_ahead is set, but facility {name!r} has type {deployment.type!r}, without a queue to wait in; "
                "remove it",
                key=key,
            )
    if federation is not None and not found:
        raise ConfigurationError(
            "submit_ahead is set, but no facility that uses it has a queue to wait in; remove it", key="submit_ahead"
        )
    return found


def why_not_ahead(deployment: Deployment) -> str:
    """Why no job can be there ahead of its model, or ''."""
    if deployment.type == FIRECREST:
        return "FirecREST gives no command on the site's file system, by which a round is handed to a waiting job"
    return ""

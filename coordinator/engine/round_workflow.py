"""round.cwl: what one round does, with the steps of every facility side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

RECORD: dict[str, Any] = {
    "type": "record",
    "name": "facility",
    "fields": {"name": "string", "dataset": "string", "settings": "File"},
}
"""What main.cwl knows of a facility."""
EVALUATE: dict[str, Any] = {
    "evaluate": {
        "run": "tools/evaluate.cwl",
        "in": {"federation": "federation", "model": "model", "round": "round"},
        "out": ["scores"],
    }
}
OUTPUTS = {"model": "Directory", "round": "int", "proceed": "boolean"}


def round_workflow(names: Sequence[str], *, encoded: bool, archive: bool, evaluates: bool) -> dict[str, Any]:
    """A train and a receive step for each facility, then aggregate; a send step where models travel `encoded`.

    `archive`: updates may start from other models than that of the round, which the receive steps find in the archive.
    `evaluates`: the coordinator evaluates the round's model on tasks itself, beside the facilities' jobs.

    Not one scattered step: that sends the model to one facility after the other, and hangs when an element fails.
    """
    steps: dict[str, Any] = {}
    for number, name in enumerate(names):
        steps |= _steps_of(number, name, encoded=encoded, archive=archive)
    return {
        "cwlVersion": "v1.2",
        "class": "Workflow",
        "doc": "One round: each facility trains and its update is received as soon as it is ready; then the updates "
        "are averaged.",
        "requirements": {"MultipleInputFeatureRequirement": {}, "StepInputExpressionRequirement": {}},
        "inputs": {
            "federation": "File",
            "archive": "string",
            "model": "Directory",
            "round": "int",
            "proceed": "boolean",
            "facilities": {"type": {"type": "array", "items": RECORD}},
        },
        "outputs": {name: {"type": kind, "outputSource": f"aggregate/{name}"} for name, kind in OUTPUTS.items()},
        "steps": steps | (EVALUATE if evaluates else {}) | {"aggregate": _aggregate(names, evaluates=evaluates)},
    }


def _steps_of(number: int, name: str, *, encoded: bool, archive: bool) -> dict[str, Any]:
    """The steps of the facility at position `number`."""
    own = {key: {"source": "facilities", "valueFrom": f"$(self[{number}].{key})"} for key in RECORD["fields"]}
    send = {
        "run": "tools/send.cwl",
        "in": {"federation": "federation", "archive": "archive", "model": "model", "round": "round"}
        | {"facility": own["name"]},
        "out": ["sent"],
    }
    train = {
        "run": "tools/train.cwl",
        "in": {
            "model": f"send_{name}/sent" if encoded else "model",
            "round": "round",
            "dataset": own["dataset"],
            "settings": own["settings"],
        },
        "out": ["update"],
    }
    receive = {
        "run": "tools/receive.cwl",
        "in": {
            "federation": "federation",
            "model": "model",
            "round": "round",
            "facility": own["name"],
            "update": f"train_{name}/update",
        }
        | ({"archive": "archive"} if archive else {}),
        "out": ["update"],
    }
    return ({f"send_{name}": send} if encoded else {}) | {f"train_{name}": train, f"receive_{name}": receive}


def _aggregate(names: Sequence[str], *, evaluates: bool) -> dict[str, Any]:
    return {
        "run": "tools/aggregate.cwl",
        "in": {
            "federation": "federation",
            "archive": "archive",
            "model": "model",
            "round": "round",
            "updates": {"source": [f"receive_{name}/update" for name in names], "linkMerge": "merge_flattened"},
        }
        | ({"scores": "evaluate/scores"} if evaluates else {}),
        "out": list(OUTPUTS),
    }

"""groups.cwl: a chain of rounds for every facility, side by side, in place of main.cwl's rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HAND_WRITTEN = (
    "chain.cwl",
    "tools/start.cwl",
    "tools/train.cwl",
    "tools/receive.cwl",
    "tools/meet.cwl",
    "tools/report.cwl",
)
"""CWL that a federation by groups needs, beside the rendered groups.cwl."""
OUTPUTS = ["model", "round", "proceed"]


def groups_workflow(names: Sequence[str]) -> dict[str, Any]:
    """groups.cwl: `begin` gives every facility its model and round, its chain loops, the last step collects.

    Not one scattered step: its facilities would wait for each other in every round.
    """
    steps: dict[str, Any] = {
        "start": {
            "run": "tools/start.cwl",
            "in": {"federation": "federation", "archive": "archive", "model": "model"},
            "out": ["round"],
        }
    }
    inputs: dict[str, Any] = {
        "federation": {"type": "File", "doc": "coordinator.json: what the coordinator's steps need to know"},
        "archive": {
            "type": "string",
            "doc": "directory on the coordinator that outlives the run; text, so that no engine stages it",
        },
        "model": {"type": "Directory", "doc": "the initial Hugging Face checkpoint; used when the archive is empty"},
    }
    for name in names:
        inputs |= {f"name_{name}": "string", f"dataset_{name}": "string", f"settings_{name}": "File"}
        steps |= {f"begin_{name}": _begin(name), chain_step(name): _chain(name)}
    steps["report"] = _report(names)
    return {
        "cwlVersion": "v1.2",
        "class": "Workflow",
        "doc": "A federation by groups. Start (or resume), a chain of rounds for each facility, a report.",
        "$namespaces": {"cwltool": "http://commonwl.org/cwltool#"},
        "requirements": {
            "SubworkflowFeatureRequirement": {},
            "MultipleInputFeatureRequirement": {},
            "StepInputExpressionRequirement": {},
        },
        "inputs": inputs,
        "outputs": {"summary": {"type": "File", "outputSource": "report/summary"}},
        "steps": steps,
    }


def _begin(name: str) -> dict[str, Any]:
    """Model and round with which a facility's chain begins."""
    return {
        "run": "tools/meet.cwl",
        "in": {
            "federation": "federation",
            "archive": "archive",
            "facility": f"name_{name}",
            "after": "start/round",
        },
        "out": OUTPUTS,
    }


def _chain(name: str) -> dict[str, Any]:
    """A facility's rounds, one after the other while there is one to come."""
    return {
        "run": "chain.cwl",
        "in": {
            "federation": "federation",
            "archive": "archive",
            "facility": f"name_{name}",
            "dataset": f"dataset_{name}",
            "settings": f"settings_{name}",
        }
        | {output: f"begin_{name}/{output}" for output in OUTPUTS},
        "out": OUTPUTS,
        "requirements": {
            "cwltool:Loop": {
                "loopWhen": "$(inputs.proceed)",
                "loop": {output: output for output in OUTPUTS},
                "outputMethod": "last",
            }
        },
    }


def _report(names: Sequence[str]) -> dict[str, Any]:
    """The last step, once every chain has ended."""
    return {
        "run": "tools/report.cwl",
        "in": {
            "federation": "federation",
            "archive": "archive",
            "after": {
                "source": [f"{chain_step(name)}/round" for name in names],
                "linkMerge": "merge_flattened",
                "valueFrom": "$(self[0])",
            },
        },
        "out": ["summary"],
    }


def chain_step(facility: str) -> str:
    """Name of the step that is a facility's chain."""
    return f"facility_{facility}"

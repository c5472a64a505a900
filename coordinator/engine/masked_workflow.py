"""What secure aggregation adds to the rendered workflow: steps on login nodes, and two at the coordinator.

keys_F (login node) -> roster -> train_F -> receive_F -> survivors -> unmask_F (login node) -> aggregate
"""

from __future__ import annotations

from typing import Any

from coordinator.config.deployment_names import CONNECTION, LOGIN_NODE, deployment_name
from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.config.masked_moments import masked_moments
from coordinator.engine.own_files import LOGIN_SUFFIX
from coordinator.engine.round_workflow import EVALUATE
from facility.exchange.messages.job_template import fill_template
from facility.exchange.messages.masking import MaskingSettings
from facility.exchange.messages.template_inheritance import COMMAND

MASKED = (
    "tools/keys.cwl",
    "tools/roster.cwl",
    "tools/train_masked.cwl",
    "tools/survivors.cwl",
    "tools/unmask.cwl",
    "tools/aggregate_masked.cwl",
)
LOGIN_SERVICE = "login"
LOGIN = f"""\
#!/bin/bash
# The login node: commands of a second, without a queue (keys, unmask).
. '<home>/env.sh'
IFS= read -r -d '' command <<'CROSSFED' || true
{COMMAND}
CROSSFED
bash -c "$command"
"""


def masking_settings(federation: Federation, facility: Facility) -> MaskingSettings | None:
    """What a facility's rendered settings say of secure aggregation."""
    privacy, aggregation = federation.masks, federation.aggregation
    if privacy is None:
        return None
    assert not isinstance(aggregation.weights, dict)
    return MaskingSettings(
        bits=privacy.bits,
        threshold=privacy.threshold_of(len(federation.facilities)),
        minimum_sum=privacy.least_sum_of(len(federation.facilities)),
        facilities=sorted(federation.names),
        weights=aggregation.weights,
        maximum_share=aggregation.maximum_share,
        clip_norm=privacy.clip_norm,
        peer_signers=facility.peer_signers or privacy.peer_signers,
        moments=masked_moments([*federation.training_of.values()]),
    )


def login_template(deployment: Deployment) -> str:
    """The shell script around a command on the facility's login node; a gate has its own."""
    if deployment.gate:
        return f"{COMMAND}\n"
    return fill_template(
        LOGIN, fill={}, environment=deployment.environment, workdir=deployment.workdir, name="login node"
    )


def login_target(deployments: dict[str, Any], deployment: Deployment, facility: str, *, workdir: str) -> dict[str, Any]:
    """The target of a facility's commands without a queue; adds what it needs to streamflow.yml's `deployments`."""
    name = deployment_name(facility)
    if deployment.type == "local":
        return {"deployment": name}
    if not deployment.host:  # the queue of this machine: its login node is here
        local = deployment_name(facility, LOGIN_NODE)
        deployments[local] = {"type": "local", "config": {}, "workdir": deployment.workdir or workdir}
        return {"deployment": local}
    ssh = name if deployment.type == "ssh" else deployment_name(facility, CONNECTION)
    deployments[ssh]["config"].setdefault("services", {})[LOGIN_SERVICE] = f"jobs/{facility}{LOGIN_SUFFIX}"
    return {"deployment": ssh, "service": LOGIN_SERVICE}


def masked_round(workflow: dict[str, Any], facilities: list[str]) -> dict[str, Any]:
    """round.cwl with the steps of secure aggregation; `workflow`: without them."""
    plain, steps = workflow["steps"], dict[str, Any]()
    for name in facilities:  # a facility's steps together, as they stood when StreamFlow was seen to run them
        steps |= _login_steps(name, plain[f"train_{name}"]) | {f"receive_{name}": plain[f"receive_{name}"]}
    own = {name: plain[name] for name in EVALUATE if name in plain}
    return workflow | {"steps": steps | own | _coordinator_steps(facilities, plain["aggregate"])}


def _login_steps(facility: str, train: dict[str, Any]) -> dict[str, Any]:
    """Keys before training, training with the roster, the answer after the deadline."""
    site = {name: train["in"][name] for name in ("dataset", "settings", "round")}
    return {
        f"train_{facility}": train | {"run": "tools/train_masked.cwl", "in": train["in"] | {"roster": "roster/roster"}},
        f"keys_{facility}": {"run": "tools/keys.cwl", "in": site, "out": ["update"]},
        f"unmask_{facility}": {
            "run": "tools/unmask.cwl",
            "in": site | {"request": "survivors/request"},
            "out": ["update"],
        },
    }


def _coordinator_steps(facilities: list[str], aggregate: dict[str, Any]) -> dict[str, Any]:
    """Who masks with whom, whose updates are summed, and taking the masks off."""
    common = {name: name for name in ("federation", "archive", "model", "round")}
    return {
        "roster": {
            "run": "tools/roster.cwl",
            "in": common | {"keys": _those_there([f"keys_{name}/update" for name in facilities])},
            "out": ["roster"],
        },
        "survivors": {
            "run": "tools/survivors.cwl",
            "in": common | {"roster": "roster/roster", "updates": aggregate["in"]["updates"]},
            "out": ["request"],
        },
        "aggregate": aggregate
        | {
            "run": "tools/aggregate_masked.cwl",
            "in": aggregate["in"]
            | {
                "request": "survivors/request",
                "answers": _those_there([f"unmask_{name}/update" for name in facilities]),
            },
        },
    }


def _those_there(sources: list[str]) -> dict[str, Any]:
    return {"source": sources, "linkMerge": "merge_flattened", "pickValue": "all_non_null"}

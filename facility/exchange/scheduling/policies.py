"""The synchronisation policies by name: what each is and which scheduler decides for it.

A policy is one file in `facility/sync/policies/` with a `DECLARATION`. Settings, plans, planner and simulator read the
declarations, none of which needs torch; the trainer loads the class.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from facility.exchange.errors import ConfigurationError
from facility.exchange.registry import Declaration, Registry, Value
from facility.exchange.scheduling.group import GroupRules, Member
from facility.exchange.scheduling.groups import GroupScheduler

Exchange = Literal["ring", "central", "sharded", "server", "pair"]


@dataclass(frozen=True, kw_only=True)
class SyncPolicy(Declaration):
    """A synchronisation policy. Its implementation is called with a `facility.sync.runtime.replica.Context`."""

    lockstep: bool = False
    """All replicas take every step together, by gradients exchanged before it."""
    accumulated: bool = False
    """Updates of all replicas are counted together (where the settings' `progress` says so)."""
    periodic: bool = False
    """Replicas exchange every `every` steps, not after each."""
    synchronous: bool = False
    """An exchange brings all replicas together: simulated with the pipelines' own traffic."""
    common_steps: bool = False
    """A group may meet before the optimizer's step and make one common step."""
    planned: bool = False
    """The planner may choose it in place of lockstep, where devices stall."""
    exchange: Exchange = "ring"
    """What an exchange costs in the simulator: a ring over the group, all through one replica (`central`), a share
    through each (`sharded`), one message each way with a server or with a peer (`pair`)."""
    vectors: float = 1.0
    """Float32 vectors over the trained weights that a rank holds at most to exchange with other replicas."""
    on_host: bool = False
    """All but one of these are in the host's memory, whatever the rank computes on."""
    scheduler: str = "facility.exchange.scheduling.policies:everybody"
    """Which replicas exchange: a function of `SchedulerInputs`, as a dotted path."""


POLICIES = Registry(
    kind="synchronisation policy",
    package="facility.sync.policies",
    entry_points="crossfed.sync_policies",
    declaration=SyncPolicy,
)


@dataclass(frozen=True, kw_only=True)
class SchedulerInputs:
    """What a scheduler is made from."""

    members: tuple[Member, ...] = ()
    """Members present from the start; others join."""
    budget: int = 0
    """Updates of all members together; 0: each makes its own number."""
    rules: GroupRules = field(default_factory=GroupRules)
    """The settings' rules for groups, without a budget."""
    seed: int = 0
    every: int = 1
    """Steps between two exchanges."""
    staleness: int = 1
    parameters: Mapping[str, Value] = field(default_factory=dict)
    """Values of the policy's own parameters."""


def scheduler_of(policy: SyncPolicy, inputs: SchedulerInputs) -> GroupScheduler:
    """The scheduler that decides for a policy. Raises `ConfigurationError` where it cannot be loaded."""
    module, _, function = policy.scheduler.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the scheduler of {policy.name!r}, {policy.scheduler}, cannot be loaded: {error}"
        ) from error
    scheduler = make(inputs)
    assert isinstance(scheduler, GroupScheduler), policy.scheduler
    return scheduler


def everybody(inputs: SchedulerInputs) -> GroupScheduler:
    """Every group is all replicas."""
    return GroupScheduler(inputs.members, GroupRules(bound=1, debias=False, budget=inputs.budget))


def groups(inputs: SchedulerInputs) -> GroupScheduler:
    """Groups form by the settings' rules."""
    return GroupScheduler(inputs.members, replace(inputs.rules, budget=inputs.budget))


def lockstep_names() -> tuple[str, ...]:
    """The built-in policies in lockstep."""
    return tuple(name for name, policy in POLICIES.built_in.items() if policy.lockstep)

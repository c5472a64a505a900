"""How the replicas of one facility keep their parameters together: the settings under `training.sync`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.emulation import Emulation, Stalls, read_trace
from facility.exchange.one_of import one_of
from facility.exchange.scheduling.group import GroupLimits, GroupRules
from facility.exchange.scheduling.groups import GroupScheduler
from facility.exchange.scheduling.policies import POLICIES, SchedulerInputs, SyncPolicy, scheduler_of
from facility.exchange.text import Line
from facility.exchange.validation import AtLeastOne, NonNegative, Positive, validated, with_settings


@validated(frozen=True, kw_only=True)
class EmulationSettings(Stalls):
    """Slow replicas down for rehearsal: SD-PIPE's random stalls, static factors, a trace of speeds."""

    trace: Line = ""
    """File `{"format": 1, "workers": {"0": [[second, factor], ...]}}`; empty: none. At the facility: absolute, `~/...`,
    or relative to CrossFed's directory there; for a local facility relative to federation.yml."""

    def build(self) -> Emulation:
        """The pure law; reads the trace file. Raises `ConfigurationError`."""
        return Emulation(**self.stalls(), trace=read_trace(resolve_path(self.trace)) if self.trace else {})


@validated(frozen=True, kw_only=True)
class SyncSettings(GroupLimits):
    """The policy between replicas and its settings; one that the policy does not use has no effect.

    bound, minimum, maximum, patience, the windows, debias, step and relay are of partial_reduce.
    """

    policy: Annotated[str, one_of(POLICIES.built_in)] = "allreduce"
    """Name of a synchronisation policy, or the dotted path `package.module:Class` of your own."""
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Parameters that the policy declares for itself (one from outside this package)."""
    bound: NonNegative[int] = 10
    minimum: AtLeastOne[int] = 1
    patience: float = 0.01
    """partial_reduce: a replica waits for others that are expected soon, so long a part of its usual step for each step
    that both are likely to make together until one of them is late again, by their records; 0: a window."""
    window_maximum_seconds: float = 0.005
    """partial_reduce: the window never grows beyond this."""
    debias: bool = True
    """partial_reduce: weigh replicas by mean rounds / own rounds, in gradients and length of common steps, or (`step:
    own`) in parameters."""
    every: Positive[int] = 10
    """local, diloco, wave: optimizer steps between two exchanges (a wave's length)."""
    staleness: NonNegative[int] = 1
    """wave: waves that a replica may be ahead of the slowest."""
    outer_learning_rate: Positive[float] = 0.7
    """diloco: step size of the outer Nesterov step."""
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """diloco: momentum of the outer Nesterov step."""
    weights: Literal["samples", "equal"] = "samples"
    """local, diloco and gradients: weigh replicas by the samples they trained on, or all alike."""
    optimizer_state: Literal["auto", "keep", "average", "reset"] = "auto"
    """When parameters are averaged: moments stay each replica's own, are averaged too, or start from zero. auto:
    average under partial_reduce with common steps, else keep."""
    step: Literal["common", "own"] = "common"
    """partial_reduce: a group averages parameters and gradients and makes one common step, or each member makes its own
    and parameters alone are averaged (as SDPipe; half the traffic). With a common step and averaged moments, moments
    travel when the same members meet for the second time in a row, and from the third time on gradients only, as
    under all-reduce."""
    relay: NonNegative[float] = 0.1
    """partial_reduce with common steps, where pipelines flush: a group of whose members none was in the group before
    takes that group's gradient along, as one member's more, and a replica that would go on alone averages parameters
    with one of its members, which answers while it computes; as long as that takes no more than this part of a usual
    step. Costs two copies of this rank's parameters; 0: off."""
    progress: Literal["accumulated", "each"] = "accumulated"
    """accumulated: replicas together make steps x replicas updates, fast ones more; each: everyone makes `steps`.
    Policies in lockstep, local and diloco always count each."""
    samples: Literal["dealt", "contiguous", "strided", "reshuffled"] = "dealt"
    """Which sequences a replica sees: its share of every batch of one common order (as one process would cut it), a
    contiguous share of the data, every n-th sequence, or everything in an order of its own. Each at its own pace."""
    bucket_bytes: Positive[int] = 25_000_000
    """allreduce: gradients exchanged at once, while the backward pass goes on. partial_reduce with common steps: what
    is exchanged at once."""
    group_cache: Positive[int] = 16
    """Process groups kept open at a time."""
    timeout_seconds: Positive[float] = 60.0
    """No exchange takes longer; a group that does is discarded."""
    heartbeat_seconds: Positive[float] = 0.5
    """How often a replica reports that it is alive."""
    missing_seconds: float = 15.0
    """A replica silent for so long has left; it may come back."""
    emulation: EmulationSettings = field(default_factory=EmulationSettings)
    """Slows replicas down for a rehearsal."""

    def __post_init__(self) -> None:
        self.declaration.values(self.parameters)
        if not self.missing_seconds > 2 * self.heartbeat_seconds:
            raise ConfigurationError(
                f"missing_seconds is {self.missing_seconds}, expected more than two heartbeats "
                f"({self.heartbeat_seconds} s each)"
            )
        super().__post_init__()
        self.rules()

    def rules(self) -> GroupRules:
        """Rules of the group scheduler under `partial_reduce`."""
        return GroupRules(
            **self.limits(),
            patience=self.patience,
            window_maximum_seconds=self.window_maximum_seconds,
            debias=self.debias,
            relay=self.relay if self.common_step else 0.0,
        )

    @property
    def state_policy(self) -> Literal["keep", "average", "reset"]:
        """What `optimizer_state` means for this policy."""
        if self.optimizer_state == "auto":
            return "average" if self.common_step else "keep"
        return self.optimizer_state

    @property
    def declaration(self) -> SyncPolicy:
        """What the policy is. Raises `ConfigurationError` for a name that is unknown."""
        return POLICIES.get(self.policy, "policy")

    @property
    def common_step(self) -> bool:
        """Whether groups exchange before the optimizer's step."""
        return self.declaration.common_steps and self.step == "common"

    @property
    def lockstep(self) -> bool:
        """Whether all replicas take every step together."""
        return self.declaration.lockstep

    @property
    def accumulated(self) -> bool:
        """Whether updates of all replicas are counted together."""
        return self.declaration.accumulated and self.progress == "accumulated"

    def scheduler(self, *, replicas: int, steps: int, members: Sequence[int] = ()) -> GroupScheduler:
        """The scheduler for `steps` steps of each of `replicas` replicas; `members` are present from the start."""
        policy = self.declaration
        inputs = SchedulerInputs(
            members=tuple(members),
            budget=steps * replicas if self.accumulated else 0,
            rules=self.rules(),
            seed=self.emulation.seed,
            every=self.every,
            staleness=self.staleness,
            parameters=policy.values(self.parameters),
        )
        return scheduler_of(policy, inputs)


def describe_policies() -> list[dict[str, Any]]:
    """What each policy declares, with defaults and texts of the settings it uses, for documentation."""
    return with_settings(POLICIES.describe(), SyncSettings, GroupLimits)

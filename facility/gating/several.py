"""Several coordinators at one facility: a gate each, with a policy, a workdir and a log of its own.

    <home>/policy.yml                 the first one's
    <home>/gates/NAME/policy.yml      another's (`setup.sh --gate KEY.pub --coordinator NAME`)

They share the facility's code, environment and `$CROSSFED_STATE`, and with that the account of what all federations may
learn of a dataset (`dataset_epsilon`): a second home would have a second account. So that neither coordinator reaches
what is the other's, their policies have no federation, no key, no name of a job and no directory in common, and nothing
of the one's lies where the other's coordinator writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.paths import resolve_path
from facility.gating.policy import STATE, Policy, named_places, read_policy

NAME = "policy.yml"
FOLDER = "gates"


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A policy, and where it lies."""

    file: Path
    policy: Policy

    @property
    def state(self) -> Path:
        return real_path(self.file).parent / STATE

    def places(self) -> Iterator[tuple[str, Path]]:
        """What its coordinator, or its jobs, rely on, by a word each."""
        yield "workdir", self.policy.place
        yield "policy", self.file
        yield "log and ledger", self.state
        yield from named_places(self.policy, self.file)


def check_others(file: Path, policy: Policy, home: Path, *, later: bool) -> None:
    """Raise `ConfigurationError` where this policy has something in common with that of an earlier gate of its home.

    `<home>/policy.yml` is the first, the others follow by name: a mistake in one policy closes no earlier gate.
    `later`: with those that follow as well, whose gates this policy would close. It is for the check of a policy by
    the site, whose answer is then the same in whatever order the gates were made.
    """
    own = real_path(file)
    follows = False
    for other_file in policies(home):
        if real_path(other_file) == own:
            if not later:
                return
            follows = True
            continue
        try:
            other = read_policy(other_file)
        except ConfigurationError:  # that gate is closed
            continue
        if reason := common(Gate(file=file, policy=policy), Gate(file=other_file, policy=other)):
            closed = f"{other_file} as well, whose gate this policy closes" if follows else f"{other_file} as well"
            raise ConfigurationError(f"{reason}; see {closed}", file=file)


def policies(home: Path) -> Iterator[Path]:
    """The policies of all gates of a facility."""
    yield from (path for path in [home / NAME, *sorted((home / FOLDER).glob(f"*/{NAME}"))] if path.is_file())


def common(one: Gate, other: Gate) -> str:
    """What two coordinators would share, or ''."""
    for name in ("federations", "keys"):
        if both := sorted(set(getattr(one.policy, name)) & set(getattr(other.policy, name))):
            return f"{name} {', '.join(both)} would come in by two gates"
    for mine, others in ((one, other), (other, one)):
        for what, path in others.places():
            if real_path(path).is_relative_to(mine.policy.place):
                return f"{path} ({what} of one gate) lies in {mine.policy.workdir}, the workdir of the other"
        if mine.policy.place.is_relative_to(others.state):
            return (
                f"{mine.policy.workdir}, the workdir of one gate, lies in {others.state}, where the other keeps its log"
            )
    data = [{real_path(resolve_path(path)) for path in gate.policy.datasets} for gate in (one, other)]
    epsilons = one.policy.dataset_epsilon, other.policy.dataset_epsilon
    if epsilons[0] != epsilons[1] and data[0] & data[1]:
        return (
            f"dataset_epsilon is {epsilons[0]:g} and {epsilons[1]:g} for one dataset, whose account all federations "
            "share"
        )
    return ""

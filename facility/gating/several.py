"""Several coordinators at one facility: a gate each, with a policy, a workdir and a log of its own.

    <home>/policy.yml                 the first one's
    <home>/gates/NAME/policy.yml      another's (`setup.sh --gate KEY.pub --coordinator NAME`)

They share the facility's code, environment and `$CROSSFED_STATE`, and with that the account of what all federations may
learn of a dataset (`dataset_epsilon`): a second home would have a second account. So that neither coordinator reaches
what is the other's, their policies have no federation, no key and no directory in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.paths import resolve
from facility.gating.policy import Policy, read_policy

NAME = "policy.yml"
FOLDER = "gates"


def check_others(file: Path, policy: Policy, home: Path) -> None:
    """Raise `ConfigurationError` where this policy has something in common with that of an earlier gate of its home.

    `<home>/policy.yml` is the first, the others follow by name: a mistake in one policy closes no earlier gate.
    """
    for other_file in policies(home):
        if other_file.resolve() == file.resolve():
            return
        try:
            other = read_policy(other_file)
        except ConfigurationError:  # that gate is closed
            continue
        if reason := common(policy, other):
            raise ConfigurationError(f"{reason}; see {other_file} as well", file=file)


def policies(home: Path) -> Iterator[Path]:
    """The policies of all gates of a facility."""
    yield from (path for path in [home / NAME, *sorted((home / FOLDER).glob(f"*/{NAME}"))] if path.is_file())


def common(one: Policy, other: Policy) -> str:
    """What two coordinators would share, or ''."""
    for name in ("federations", "keys"):
        if both := sorted(set(getattr(one, name)) & set(getattr(other, name))):
            return f"{name} {', '.join(both)} would come in by two gates"
    for mine, others in ((one, other), (other, one)):
        for path in [others.place, others.coordinators, others.peer_signers]:
            if path is not None and path.resolve().is_relative_to(mine.place):
                return f"{path}, of one gate, lies in {mine.workdir}, the workdir of the other"
    data = [{resolve(path).resolve() for path in policy.datasets} for policy in (one, other)]
    if one.dataset_epsilon != other.dataset_epsilon and data[0] & data[1]:
        return (
            f"dataset_epsilon is {one.dataset_epsilon:g} and {other.dataset_epsilon:g} for one dataset, whose account "
            "all federations share"
        )
    return ""

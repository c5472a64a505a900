"""What all federations together may learn of one dataset: their stated epsilons, added up at the facility.

    export CROSSFED_DATASET_EPSILON=16    # the most that all federations on one dataset may spend together

Set in the site's `site.sh`, or by its gate from `policy.yml` (`dataset_epsilon`). A federation reserves its whole
stated budget in the dataset's account before its first job trains; its own ledger keeps it to that. Budgets of
federations on the same data compose at worst as the sums of their epsilons and deltas (C. Dwork, A. Roth, "The
algorithmic foundations of differential privacy", 2014, theorem 3.16), so the sum is a bound whichever of them run
side by side. The account is kept whether or not there is a limit.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from facility.dataset import NAME, open_dataset
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.durable import write_json
from facility.exchange.files.locks import take_lock
from facility.exchange.json_values import values_in
from facility.exchange.messages.privacy import DATASET_LIMIT, Unit
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.text import rounded_down
from facility.exchange.validation import parse_dataclass, validated
from facility.rounds.kept import STATES, shared_directory
from facility.rounds.released import check_count, steps_released

log = logging.getLogger(__name__)

FOLDER = ".privacy"
"""Beside the states of federations, whose names begin with a letter or digit."""


@validated(frozen=True, kw_only=True)
class Reserved:
    """What one federation may spend on the dataset."""

    epsilon: float
    delta: float
    unit: Unit
    steps: int = 0
    """Noised steps in its ledger as its last job began or ended."""


def reserve_budget(
    settings: FacilitySettings, dataset: Path, environment: Mapping[str, str] = os.environ, *, state: Path
) -> None:
    """Enter this federation's stated budget in the dataset's account, and how much its ledger holds by now.

    Raises `InputError` where the budget does not fit, or the ledger in `state` holds less than it did.
    """
    limit, asked = limit_of(environment), settings.differential
    if asked is None:
        if limit:
            raise InputError(
                f"this site allows epsilon {limit:g} for all federations on one dataset ({DATASET_LIMIT}), and the "
                "settings ask for no differential privacy: nothing would bound what they spend"
            )
        return
    if limit:
        check_one_account(dataset)
    path, name = account_path(dataset), f"{settings.federation}/{settings.facility}"
    with alone(path):
        account = read_account(path)
        before = account.pop(name, None)
        mine = Reserved(
            epsilon=max(asked.epsilon, before.epsilon if before else 0.0),
            delta=max(asked.delta, before.delta if before else 0.0),
            unit=asked.unit,
            steps=steps_released(state),
        )
        if before is not None:
            check_count(state, before.steps, f"the dataset's account {path}")
        if limit:
            check_fits(mine, account, limit, units=units_in(dataset, asked.unit))
        if mine != before:
            write_account(path, account | {name: mine})
        if before is None or mine.epsilon > before.epsilon:
            total = math.fsum(one.epsilon for one in account.values()) + mine.epsilon
            log.info("federations on this dataset have reserved epsilon %g in all (%s)", total, path)


def count_released(settings: FacilitySettings, dataset: Path, state: Path) -> None:
    """Enter how much the ledger holds after a job trained, where a budget is reserved; what hinders it is logged."""
    if settings.differential is None:
        return
    path, name = account_path(dataset), f"{settings.federation}/{settings.facility}"
    try:
        with alone(path):
            account = read_account(path)
            if name in account and (steps := steps_released(state)) > account[name].steps:
                write_account(path, account | {name: replace(account[name], steps=steps)})
    except (InputError, OSError) as error:
        log.warning("the dataset's account does not say how much was released by now: %s", error)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the account's lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path.with_suffix(".lock"), "a", encoding="utf-8") as lock:
        take_lock(lock, path)
        yield


def units_in(dataset: Path, unit: Unit) -> int:
    """Documents or blocks that a dataset is trained on; 0: not known."""
    if not (Path(dataset) / NAME).is_file():
        return 0
    train = open_dataset(dataset).manifest.splits["train"]
    return train.documents if unit == "document" else train.blocks


def check_fits(mine: Reserved, others: Mapping[str, Reserved], limit: float, *, units: int) -> None:
    """Raise `InputError` unless all budgets together are within the limit.

    `units`: of the dataset; 0: not known. Deltas add up as epsilons do. To publish one unit whole, drawn at random, has
    epsilon 0 and a delta of one over the units: a sum of deltas above that bounds nothing.
    """
    if odd := sorted(name for name, one in others.items() if one.unit != mine.unit):
        raise InputError(
            f"the settings protect a {mine.unit}, and {', '.join(odd)} protected another unit of the same dataset: "
            "they add up to no bound, which this site asks for"
        )
    total = math.fsum([mine.epsilon, *(one.epsilon for one in others.values())])
    if total > limit * (1 + 1e-9):
        listed = ", ".join(f"{name} {one.epsilon:g}" for name, one in sorted(others.items()))
        raise InputError(
            f"out of the dataset's privacy budget: this site allows epsilon {limit:g} for all federations together, "
            f"others have reserved {total - mine.epsilon:g} ({listed}), and the settings ask for {mine.epsilon:g}"
        )
    delta = math.fsum([mine.delta, *(one.delta for one in others.values())])
    if units and delta > 1 / units:
        raise InputError(
            f"out of the dataset's privacy budget: the deltas of all federations on it add up to {delta:g}, more than "
            f"one over its {units} units of training ({rounded_down(1 / units):g}): that bounds nothing; ask for less"
        )


def account_path(dataset: Path) -> Path:
    """The account of a dataset: named by its content, wherever it lies below the same directory of states."""
    identity = str(real_path(dataset))
    if (Path(dataset) / NAME).is_file():
        splits = open_dataset(dataset).manifest.splits
        identity = " ".join(f"{name} {entry.sha256}" for name, entry in sorted(splits.items()))
    return shared_directory(dataset) / FOLDER / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def check_one_account(dataset: Path) -> None:
    """Raise `InputError` where the account would lie beside a link to the dataset: another path has another one."""
    place = shared_directory(dataset)
    if not os.environ.get(STATES) and real_path(place.parent) != real_path(dataset).parent:
        raise InputError(
            f"{dataset} is a link, and {DATASET_LIMIT} would hold for each path to the dataset by itself: {STATES} is "
            f"not set, so that the account lies beside the path; add `export {STATES}={place}` to site.sh, where it is "
            "one for all paths"
        )


def read_account(path: Path) -> dict[str, Reserved]:
    """What was reserved, by federation and facility. Raises `InputError` where the file is damaged."""
    try:
        return {name: parse_dataclass(Reserved, one) for name, one in values_in(path).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, ConfigurationError) as error:
        raise InputError(
            f"{path} is damaged ({error}): how much federations have reserved of this dataset's privacy budget is not "
            "known, so nothing more is released; restore the file from a backup"
        ) from None


def write_account(path: Path, account: Mapping[str, Reserved]) -> None:
    write_json(path, {name: asdict(one) for name, one in sorted(account.items())})


def limit_of(environment: Mapping[str, str]) -> float:
    """The site's limit; 0: none. Raises `ConfigurationError`."""
    text = environment.get(DATASET_LIMIT, "") or "0"
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise ConfigurationError(f"{DATASET_LIMIT} is {text!r}, expected an epsilon such as 16, or 0 for no limit")
    return limit

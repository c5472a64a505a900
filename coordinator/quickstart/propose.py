"""From a site's answers to proposals, each with its reason: pure decisions over a `Survey`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.quickstart.survey import Survey, version_of
from coordinator.schedulers.partition import Partition
from facility.exchange.messages.template_inheritance import PLACEHOLDER, read_template, shipped_templates

SMALL = re.compile(r"(?i)debug|test|dev|interactive|express|short")
"""Names of partitions for trying things out."""
HOURS = 2.0
"""Time limit of a job, where the partition allows it."""
GENERAL = ("slurm", "pbs", "flux", "gridengine", "ssh")
"""Templates of schedulers, not of sites."""
ALIASES = {"mn5": "marenostrum5", "lxp": "meluxina", "it4i": "karolina", "macc": "deucalion", "izum": "vega"}
"""Other words in the names of login nodes, each with the template of its site."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A value and why."""

    value: str
    why: str
    others: tuple[str, ...] = ()
    """What else the site has."""


def site_template(host: str) -> str:
    """The shipped template of the site that the login node's name indicates, else ''."""
    labels = re.findall(r"[a-z0-9]+", host.lower())
    for name in shipped_templates():
        known = {name, *(alias for alias, of in ALIASES.items() if of == name)}
        if name not in GENERAL and known & set(labels):
            return name
    return ""


def placeholders(template: str) -> list[str]:
    """Names to fill in a shipped template, `home` left out."""
    return sorted(set(PLACEHOLDER.findall(read_template(shipped_templates()[template]))) - {"home"})


def partition(partitions: Sequence[Partition], accounts: Sequence[str]) -> Proposal:
    """The partition that training jobs belong in: open, allowed, with GPUs if any has, the default, the largest."""
    usable = [one for one in partitions if one.open and (not one.allowed or one.allowed & set(accounts))]
    if not usable:
        return Proposal(value="", why="the scheduler names no partition or queue that is open to this account")
    best = max(usable, key=lambda one: (bool(one.gpus), not SMALL.search(one.name), one.default, one.nodes))
    why = best.describe() + ("; the site's default" if best.default else "")
    return Proposal(value=best.name, why=why, others=tuple(one.name for one in usable if one is not best))


def account(accounts: Sequence[str]) -> Proposal:
    """The first of the account's own accounts; empty where the scheduler names none."""
    if not accounts:
        return Proposal(value="", why="the scheduler names no account, so none is given")
    why = "the only one of yours" if len(accounts) == 1 else f"the first of {len(accounts)} of yours"
    return Proposal(value=accounts[0], why=why, others=tuple(accounts[1:]))


def workdir(survey: Survey) -> Proposal:
    """A scratch file system before others, then the one with most room."""
    if not survey.places:
        return Proposal(value="", why="the site names no directory that this account can write to")
    best = max(survey.places, key=lambda place: ("SCRATCH" in place.name, place.name != "HOME", place.free))
    return Proposal(
        value=f"{best.path}/crossfed-work",
        why=f"${best.name}, {best.free / 1e9:.0f} GB free; it must be shared by the nodes",
        others=tuple(f"{place.path}/crossfed-work" for place in survey.places if place is not best),
    )


@dataclass(frozen=True, kw_only=True)
class Install:
    """How the facility gets its Python packages."""

    arguments: tuple[str, ...]
    """Arguments of facility/setup.sh; none: nothing can be installed."""
    modules: tuple[str, ...] = ()
    bundle: bool = False
    """Send the packages: there is no internet."""
    why: str


def install(survey: Survey) -> Install:
    """An interpreter that has everything, else a recent one, else a module; a bundle where nothing can be downloaded.

    `arguments` is empty and `why` says so where the site has no recent Python at all.
    """
    recent = [one for one in survey.pythons if one.recent]
    if whole := next((one for one in recent if not one.lacks), None):
        return Install(arguments=("--as-is", "--python", whole.command), why=f"{whole.command} has all that is needed")
    bundle = not survey.internet
    how = "there is no internet: a bundle is sent" if bundle else "packages come from the internet"
    if recent:
        one = recent[0]
        version = ".".join(map(str, one.version))
        return Install(arguments=("--python", one.command), bundle=bundle, why=f"Python {version}; {how}")
    found = [one for one in survey.modules if re.match(r"(?i)(.*/)?python/", one) and version_of(one) >= (3, 11)]
    if not found:
        return Install(arguments=(), bundle=bundle, why="no Python 3.11 or newer, as a command or as a module")
    newest = max(found, key=version_of)
    return Install(arguments=("--python", "python3"), modules=(newest,), bundle=bundle, why=f"module {newest}; {how}")


def python_version(survey: Survey) -> str:
    """Version of the interpreter that `install` chooses, such as `3.11`, for a bundle."""
    recent = [one.version for one in survey.pythons if one.recent]
    versions = [recent[0]] if recent else [version_of(name)[:2] for name in install(survey).modules]
    return ".".join(map(str, versions[0])) if versions else "3.11"

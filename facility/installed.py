"""Packages that this environment has, beside what CrossFed asks for: a site's own may be missing or too old."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import facility
from facility.exchange.requirements import meets_requirement

NAME = "crossfed"


def asked() -> list[str]:
    """What a facility's environment must hold, as pip's requirements: as the checkout says, or else the installed
    package; nothing where neither is there.
    """
    project = Path(facility.__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        said = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if said.get("name") == NAME:
            return list(said["dependencies"])
    try:
        return importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def unmet_requirements(requirements: list[str]) -> list[str]:
    """Each requirement that this environment does not meet, with what is there: `peft 0.18.1, expected >=0.20`."""
    from packaging.requirements import Requirement  # here: it is one of those that may be missing

    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed")
            continue
        if not meets_requirement(version, text):
            found.append(f"{requirement.name} {version}, expected {requirement.specifier}")
    return found


def requirement_problems() -> list[str]:
    """Every requirement of CrossFed that this environment does not meet, in words; empty where all are met."""
    try:
        return unmet_requirements(asked())
    except ModuleNotFoundError as error:
        return [f"{error.name} is not installed"]

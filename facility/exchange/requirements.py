"""Whether a version of a package is one that a requirement, as pip writes it, asks for."""

from __future__ import annotations


def meets_requirement(version: str, requirement: str) -> bool:
    """Whether a version, which may be no version at all, is one that the requirement asks for."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    try:
        return Requirement(requirement).specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False

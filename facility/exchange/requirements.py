"""Whether a version of a package is one that a requirement, as pip writes it, asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def meets(version: str, requirement: Requirement | str) -> bool:
    """Whether a version, which may be no version at all, is one that the requirement asks for."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    specifier = (Requirement(requirement) if isinstance(requirement, str) else requirement).specifier
    try:
        return specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False

"""The software of a federation as CycloneDX 1.6: the coordinator's packages, and what the facilities reported."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

from coordinator.config.evaluation import COORDINATOR
from facility import __version__


def bill_of_materials(
    versions: Mapping[str, Mapping[str, str]], name: str, own_name: str = COORDINATOR
) -> dict[str, Any]:
    """`versions`: package versions by the facility that reported them; the coordinator's own packages are read here.

    `own_name`: what the coordinator is called in `versions`.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for package in importlib.metadata.distributions():
        metadata = package.metadata
        if "Name" in metadata and "Version" in metadata:  # what an installation that broke off leaves may lack them
            found.setdefault((_normal(metadata["Name"]), metadata["Version"]), set()).add(own_name)
    for facility, packages in versions.items():
        for title, version in packages.items():
            found.setdefault((_normal(title), version), set()).add(facility)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": name, "version": __version__}},
        "components": [
            {
                "type": "library",
                "name": title,
                "version": version,
                "purl": f"pkg:pypi/{title}@{version.replace('+', '%2B')}",
                "properties": [{"name": "crossfed:where", "value": one} for one in sorted(where)],
            }
            for (title, version), where in sorted(found.items())
        ],
    }


def _normal(name: str) -> str:
    """The name of a package in the normalised form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()

"""What the product imports is a dependency of its own, in pyproject.toml, and not there by another package's leave."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import distributions as installed
from importlib.metadata import packages_distributions, requires, version

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.house.imports import PACKAGES, ROOT, imported_names, together
from tests.house.lock import distributions, normal

pytestmark = together

COMES_WITH = {
    "annotated-types": "pydantic",
    "pydantic-core": "pydantic",
    "markupsafe": "jinja2",
    "aiosqlite": "streamflow",
    "asyncssh": "streamflow",
    "cwl-utils": "streamflow",
    "httpcore": "httpx",
    "httpx": "pyfirecrest",
}
"""Imported packages whose version another dependency settles, by that dependency: both work on the same objects."""

OF_THE_USER = {"mlflow", "wandb"}
"""Imported where a federation names them (`report.trackers`), and installed by who does."""


def imported(package: str) -> set[str]:
    """Distributions, by the names that pip knows, from which any file of a package imports anything anywhere."""
    files = (ROOT / package).rglob("*.py")
    modules = {name.partition(".")[0] for path in files for name in imported_names(path)}
    known = packages_distributions()
    return {
        # A name that several distributions share (ruamel, typer) is the one that is asked for.
        min(map(normal, known.get(module, [module])), key=lambda name: (name not in declared("coordinator"), name))
        for module in modules - sys.stdlib_module_names - set(PACKAGES)
    }


def declared(package: str) -> set[str]:
    """What is installed with the package: a facility's has no extra but that of quantized models."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ["quantized"] if package == "facility" else ["coordinator", "firecrest", "publish", "eval"]
    further = [one for extra in extras for one in project["optional-dependencies"][extra]]
    return distributions(project["dependencies"] + further)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package: str) -> None:
    found = imported(package)
    assert {"torch", "numpy"} <= found
    assert found - declared(package) - set(COMES_WITH) - OF_THE_USER == set()


def test_versions_that_code_and_pages_name_are_those_that_are_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)}
    files = [
        path for place in (*PACKAGES, "docs") for kind in ("py", "md") for path in (ROOT / place).rglob(f"*.{kind}")
    ]
    told = {one for path in files for one in re.findall(r"[\"']([A-Za-z][\w.-]+>=[\d.]+)[\"']", path.read_text())}
    assert len(told) >= 2 and told - known == set()


def test_what_comes_with_another_does_so() -> None:
    assert set(COMES_WITH) <= imported("facility") | imported("coordinator")
    for name, brings in COMES_WITH.items():
        always = [one for one in requires(brings) or [] if "extra ==" not in one]
        assert name in distributions(always), (name, brings)
        assert brings in declared("coordinator") | set(COMES_WITH)


def test_the_oldest_python_takes_every_pinned_version() -> None:
    """pip refuses all of constraints.txt for one version that asks for a later Python, a release's last figure too."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = f"{asked.removeprefix('>=')}.0"
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    if f"transformers=={version('transformers')}" not in pinned:
        pytest.skip("other packages are installed than the pinned ones, as by `make lowest`")
    known = {f"{normal(one.name)}=={one.version}": one.metadata.get("Requires-Python") for one in installed()}
    found = {pin: known[pin] for pin in known.keys() & pinned if known[pin]}
    assert len(found) > len(pinned) / 2
    assert {pin: asks for pin, asks in found.items() if oldest not in SpecifierSet(asks)} == {}


def test_each_oldest_version_is_one_that_can_be_installed() -> None:
    """Of what `make lowest` installs, each is the oldest that is admitted, or a package that facilities do without, or
    what that brings, asks for a later one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, project["dependencies"])
    oldest = {normal(one.name): next(each.version for each in one.specifier if each.operator == ">=") for one in asked}
    if Version(version("transformers")) != Version(oldest["transformers"]):
        pytest.skip("these are not the oldest packages, as by `make lowest`")
    later = {name for name, bound in oldest.items() if Version(version(name)) != Version(bound)}
    ask = [
        (normal(one.name), normal(each.name))
        for one in installed()
        for each in map(Requirement, one.requires or [])
        if (each.marker is None or each.marker.evaluate({"extra": ""})) and normal(each.name) in oldest
        if not each.specifier.contains(oldest[normal(each.name)])
    ]
    assert [(by, name) for by, name in ask if by in oldest] == []
    assert later - {name for _, name in ask} == set()

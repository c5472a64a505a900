"""What an environment has is held against what CrossFed asks for, by the checkout or by the installed package."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from facility import installed

PROJECT = Path(installed.__file__).parents[1] / "pyproject.toml"


def test_the_environment_of_the_tests_meets_all_that_is_asked_for():
    listed = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    assert installed.asked() == listed and len(listed) > 10 and installed.requirement_problems() == []


def test_what_is_missing_or_of_another_version_is_told_and_what_another_extra_asks_for_is_not():
    torch = importlib.metadata.version("torch")
    asked = ["torch>=2", "torch<2", "no-such-package>=1", "torch<1; extra == 'x'", "numpy<0; python_version < '3'"]
    assert installed.unmet_requirements(asked) == [f"torch {torch}, expected <2", "no-such-package is not installed"]


def test_without_a_checkout_the_installed_package_says_what_it_asks_for(tmp_path: Path, monkeypatch):
    """Another project's file beside the package is not asked."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\ndependencies = ["no-such-package"]\n')
    monkeypatch.setattr("facility.__file__", str(tmp_path / "facility" / "__init__.py"))
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy<1", "x; extra == 'y'"])
    assert installed.requirement_problems() == [f"numpy {importlib.metadata.version('numpy')}, expected <1"]

    def unknown(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", unknown)
    assert installed.requirement_problems() == []


def test_an_environment_too_bare_to_read_versions_is_told(monkeypatch: pytest.MonkeyPatch):
    def missing(requirements: list[str]) -> list[str]:
        raise ModuleNotFoundError("No module named 'packaging'", name="packaging")

    monkeypatch.setattr(installed, "unmet_requirements", missing)
    assert installed.requirement_problems() == ["packaging is not installed"]

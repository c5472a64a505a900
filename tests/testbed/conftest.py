"""The testbed that all tests here share."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.testbed import stand
from coordinator.testbed.layout import Site, Testbed
from coordinator.testbed.rehearsal import prepare_sites


@contextmanager
def standing(names: list[str]) -> Iterator[Testbed]:
    """Facilities with plain links, taken down at the end."""
    root = Path(tempfile.mkdtemp(prefix="crossfed-testbed-", dir="/var/tmp"))
    try:
        testbed = stand.up(root, names)
        try:
            yield testbed
        finally:
            stand.down(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)  # `up` that fails leaves an empty directory that it was given


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """Two facilities, `site-a` and `site-b`."""
    with standing(["site-a", "site-b"]) as two:
        yield two


@pytest.fixture(scope="module")
def three() -> Iterator[Testbed]:
    """Three facilities of a module's own."""
    with standing(["site-a", "site-b", "site-c"]) as three:
        yield three


@pytest.fixture(scope="session")
def material(testbed: Testbed) -> tuple[Path, dict[str, str]]:
    """A small model, and at every facility a dataset that its own user prepared there."""
    return prepare_sites(testbed)


@pytest.fixture(autouse=True)
def coordinator_home(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What the tests start uses the testbed's keys and known hosts."""
    if "testbed" in request.fixturenames:
        monkeypatch.setenv("HOME", str(request.getfixturevalue("testbed").coordinator_home))


def ssh(testbed: Testbed, site: Site, command: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a shell command at a facility as its user, as the coordinator would."""
    line = ["ssh", "-F", str(testbed.ssh_config), site.name, command]
    return subprocess.run(line, capture_output=True, text=True, timeout=options.pop("timeout", 120), **options)

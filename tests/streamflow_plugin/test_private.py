"""Directories that StreamFlow opens to everybody are made for their owner alone."""

from __future__ import annotations

import pytest

pytest.importorskip("streamflow")

from coordinator.streamflow_plugin.ssh import private


def test_a_directory_for_everybody_becomes_the_owners():
    assert private(["mkdir", "-m", "777", "-p", "/scratch/u/job"]) == ["mkdir", "-m", "700", "-p", "/scratch/u/job"]


@pytest.mark.parametrize("command", [["mkdir", "-p", "/x"], ["cat", "-m", "777"], ["mkdir", "-m", "750", "/x"], []])
def test_other_commands_stay_as_they_are(command: list[str]):
    assert private(command) == command

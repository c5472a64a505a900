"""The sshd that the tests of logins share, and no facility that an earlier test has left away."""

import pytest

from coordinator.streamflow_plugin import problems
from tests.streamflow_plugin.local_sshd import site as site


@pytest.fixture(autouse=True)
def nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's process keeps who is away, and tests share one process and the names of their facilities."""
    monkeypatch.setattr(problems, "_away", {})

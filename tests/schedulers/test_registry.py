"""A scheduler is one module: ours are found, and so are those of other packages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from coordinator.schedulers import registry
from coordinator.schedulers.none import NoScheduler
from coordinator.schedulers.scheduler import BatchScheduler
from docs.generate import registries
from facility.exchange.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]


def test_ours_are_found():
    assert set(registry.schedulers()) == {"slurm", "pbs", "flux", "gridengine", "firecrest", "ssh"}
    with pytest.raises(ConfigurationError, match="expected one of .*slurm"):
        registry.scheduler_named("slrum")


def test_the_reference_lists_every_one_with_its_manual():
    page = registries().partition("## Schedulers")[2]
    for name, one in registry.schedulers().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert one.title in row
    assert "slurm.schedmd.com" in page and "gridscheduler" in page


def test_one_from_another_package_is_found(monkeypatch: pytest.MonkeyPatch):
    class Elsewhere(NoScheduler):
        name, title = "elsewhere", "Elsewhere"

    class Entry:
        value = "package:SCHEDULER"

        def load(self) -> NoScheduler:
            return Elsewhere()

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()] if group == registry.GROUP else [])
    registry.schedulers.cache_clear()
    try:
        assert registry.scheduler_named("elsewhere").title == "Elsewhere"
        monkeypatch.setattr(Entry, "load", lambda self: "text")
        registry.schedulers.cache_clear()
        with pytest.raises(ConfigurationError, match="is a str"):
            registry.schedulers()
    finally:
        monkeypatch.undo()
        registry.schedulers.cache_clear()


@pytest.mark.parametrize(
    ("name", "directive"), [("slurm", "#SBATCH --signal=USR1@300"), ("flux", "#flux: --signal=SIGUSR1@300s")]
)
def test_the_shipped_template_asks_for_the_signal_before_the_limit(name: str, directive: str):
    """PBS is not asked: it sends TERM by itself."""
    assert directive in (ROOT / "templates" / f"{name}.sh").read_text().splitlines()


def test_streamflows_connectors_exist():
    pytest.importorskip("streamflow")
    from coordinator.streamflow_plugin.ahead_queue import AheadQueue, connector_for

    for one in registry.schedulers().values():
        if isinstance(one, BatchScheduler):
            assert issubclass(connector_for(one), AheadQueue) and not connector_for(one).__abstractmethods__

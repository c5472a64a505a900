"""Stopping a run ends what it started on this machine: no process of a local facility outlives it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.engine.run import engine_command
from coordinator.engine.supervise import Limits, Supervisor
from tests.engine.engines import bare_environment
from tests.federations import write_federation


def processes(word: str) -> list[str]:
    """Command lines of living processes that hold `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line:
            found.append(line)
    return found


def test_stopping_ends_the_training_of_a_local_facility(tmp_path: Path):
    file = write_federation(tmp_path, ["near"], rounds=1, training={"steps": 10**6}, final_evaluation=False)
    federation = read_federation(file)
    write_rendered(federation)
    lines: list[str] = []
    supervisor = Supervisor(
        command=lambda: engine_command(federation),
        directory=file.parent,
        environment=bare_environment(tmp_path / "machine") | {"OMP_NUM_THREADS": "1"},
        queues=[],
        on_line=lines.append,
        rounds_done=lambda: 0,
        limits=Limits(stop_seconds=10),
    )
    result: list[tuple[int, str]] = []
    thread = threading.Thread(target=lambda: result.append(supervisor.run()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 200
    while not any("facility.train" in line for line in processes(str(tmp_path))):
        assert time.monotonic() < deadline and thread.is_alive(), lines[-20:]
        time.sleep(0.2)
    supervisor.stop(signal.SIGTERM)
    thread.join(60)
    assert result == [(128 + signal.SIGTERM, "stopped")], lines[-20:]
    deadline = time.monotonic() + 200
    while left := processes(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)

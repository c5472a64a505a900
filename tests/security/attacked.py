"""Federations with a facility that attacks, run by a real StreamFlow; the facilities are local or reached by ssh."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncssh
import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.files.paths import CHECKOUT
from tests.federations import write_federation
from tests.ports import free_port

HONEST = "honest"


@contextmanager
def ssh_site(folder: Path) -> Iterator[dict[str, Any]]:
    """An ssh server on this machine that runs what it is asked in bash; yields the `deployment` that reaches it.

    $HOME below `folder` holds the known host and the key, as StreamFlow reads them.
    """
    home, site = folder / "home", folder / "site"
    (home / ".ssh").mkdir(parents=True)
    site.mkdir()
    key, host_key = asyncssh.generate_private_key("ssh-ed25519"), asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(home / ".ssh" / "id_ed25519")
    (home / ".ssh" / "id_ed25519").chmod(0o600)
    port = free_port()
    line = host_key.export_public_key().decode().strip()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {line}\n")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    authorized = asyncssh.import_authorized_keys(key.export_public_key().decode())
    listening = asyncssh.listen(
        "127.0.0.1",
        port,
        server_host_keys=[host_key],
        authorized_client_keys=authorized,
        process_factory=lambda process: _serve(process, home),
        encoding=None,
    )
    server = asyncio.run_coroutine_threadsafe(_awaited(listening), loop).result(30)
    try:
        yield {
            "type": "ssh",
            "host": f"127.0.0.1:{port}",
            "user": "facility",
            "key": str(home / ".ssh" / "id_ed25519"),
            "workdir": str(site),
        }
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


async def _awaited(what: Any) -> Any:
    return await what


async def _serve(process: asyncssh.SSHServerProcess, home: Path) -> None:
    """One command, as sshd would run it for an account that has this checkout's Python."""
    environment = os.environ | {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    running = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        process.command or "bash",
        env=environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert running.stdin is not None and running.stdout is not None and running.stderr is not None
    feeding = asyncio.create_task(_pump(process.stdin, running.stdin))
    await asyncio.gather(_pump(running.stdout, process.stdout), _pump(running.stderr, process.stderr))
    code = await running.wait()
    feeding.cancel()
    process.exit(code)


async def _pump(source: Any, sink: Any) -> None:
    """All bytes of one stream into another; the end of a command's input closes it."""
    with suppress(ConnectionError, BrokenPipeError, asyncssh.Error):
        while block := await source.read(1 << 16):
            sink.write(block)
            await sink.drain()
        if isinstance(sink, asyncio.StreamWriter):
            sink.close()


def attacked_federation(
    root: Path, behaviours: dict[str, dict[str, Any]], *, deployment: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """federation.yml of an honest local facility and hostile ones (reached by `deployment`), rendered.

    `behaviours`: what each hostile facility does (`hostile_facility.py`), by its name.
    """
    path = write_federation(root, [HONEST, *behaviours], **({"rounds": 1, "final_evaluation": False} | changes))
    described = yaml.safe_load(path.read_text())
    for facility in described["facilities"]:
        name = facility["name"]
        dataset = root / "sites" / name / "dataset"
        (dataset / "behaviour.json").write_text(json.dumps(behaviours.get(name, {})))
        if deployment is not None and name != HONEST:
            facility |= {"deployment": deployment, "dataset": str(dataset)}
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    write_rendered(read_federation(path))
    tool = root / "cwl" / "tools" / "train.cwl"
    text = (CHECKOUT / "cwl" / "tools" / "train.cwl").read_text()
    assert "facility.round" in text
    tool.write_text(text.replace("facility.round", "tests.security.hostile_facility"))
    return path


def archive_of(path: Path) -> Archive:
    return Archive(read_federation(path).archive_path)


def rows_of(path: Path, number: int = 0) -> dict[str, Any]:
    """The facilities' rows of one archived round."""
    return {row.facility: row for row in archive_of(path).read_round(number).facilities}

"""Where a notification goes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.config.notifying import NotifySettings
from coordinator.engine.notify import Notifier


@contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """A server on this machine: its address, and what was posted to it."""
    posted: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", posted
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("capitals", [False, True])
def test_what_is_posted_to_this_machine_passes_no_proxy(
    capitals: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Sites set http_proxy, often without a no_proxy: it would read an address that is a secret."""
    for name in ("no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    with listening() as (proxy, read_by_proxy), listening() as (address, posted):
        monkeypatch.setenv("HTTP_proxy" if capitals else "http_proxy", proxy)
        webhook = address.replace("http:", "HTTP:") if capitals else address
        notifier = Notifier("f", NotifySettings(webhook=f"{webhook}/secret"), tmp_path)
        notifier.notify("done", "federation f is done")
        notifier.close()
    assert [json.loads(one)["event"] for one in posted] == ["done"] and read_by_proxy == []

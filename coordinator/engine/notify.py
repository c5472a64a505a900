"""Notifications: a command or a webhook, called beside the run, once per occasion, never twice and never in its way."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coordinator.config.notifying import NotifySettings, is_private_address
from facility.exchange.messages.strict_json import clean_text

log = logging.getLogger("coordinator.engine")

WAIT_SECONDS = 20.0
"""What a command or a webhook may take."""
LONGEST = 500
"""Characters of the text."""


class Notifier:
    """Sends messages from a thread of its own; `close` waits for those under way."""

    def __init__(self, federation: str, settings: NotifySettings, folder: Path) -> None:
        """`folder`: relative paths in `webhook: file:...` count from it."""
        self.federation, self.settings, self.folder = federation, settings, folder
        self._told: set[tuple[str, str, str]] = set()
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if settings.command or settings.webhook:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def notify(self, event: str, text: str, *, facility: str = "", round: int | None = None, once: str = "") -> None:
        """Report an occasion; the same `event`, facility and `once` are reported one time."""
        key = (event, facility, once or str(round))
        if self._thread is None or event not in self.settings.on or key in self._told:
            return
        self._told.add(key)
        message = {"federation": self.federation, "event": event, "facility": facility, "round": round}
        self._queue.put(message | {"text": clean_text(text, LONGEST), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})

    def forget(self, event: str, facility: str) -> None:
        """The occasion has passed: the next one of this kind is a new one."""
        self._told = {key for key in self._told if key[:2] != (event, facility)}

    def close(self) -> None:
        """Wait until what was reported has been sent, 2 x `WAIT_SECONDS` at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(2 * WAIT_SECONDS)

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            for send in (self._command, self._webhook):
                try:
                    send(json.dumps(message, ensure_ascii=False).encode())
                except Exception as error:  # the address may be a secret: only the kind of failure is shown
                    log.warning("notification of %r was not sent: %s", message["event"], type(error).__name__)

    def _command(self, body: bytes) -> None:
        if self.settings.command:
            subprocess.run(
                self.settings.command,
                input=body,
                timeout=WAIT_SECONDS,
                check=True,
                cwd=self.folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def _webhook(self, body: bytes) -> None:
        if not (address := self.settings.webhook):
            return
        if address.startswith("file:"):
            address = (
                (self.folder / Path(address.removeprefix("file:")).expanduser()).read_text(encoding="utf-8").strip()
            )
        if not is_private_address(address):
            raise ValueError("neither https nor this machine")
        request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"})
        # A proxy of the environment would read what goes to this machine unencrypted, and find another machine there.
        direct = [] if address.lower().startswith("https:") else [urllib.request.ProxyHandler({})]
        with urllib.request.build_opener(_NoRedirect, *direct).open(request, timeout=WAIT_SECONDS):
            pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The message goes to the address that was given, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None

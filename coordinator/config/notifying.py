"""`notify:` in federation.yml: whom to notify when operator action is needed or a federation has ended."""

from __future__ import annotations

from dataclasses import field
from typing import Literal
from urllib.parse import urlsplit

from facility.exchange.addresses import LOOPBACK
from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Line
from facility.exchange.validation import validated

Occasion = Literal["done", "stopped", "stuck", "login", "lost"]
OCCASIONS: tuple[Occasion, ...] = ("done", "stopped", "stuck", "login", "lost")


def is_private_address(address: str) -> bool:
    """Whether what is posted there is encrypted on its way, or stays on this machine."""
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and (
            parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
        )
    except ValueError:
        return False


@validated(frozen=True, kw_only=True)
class NotifySettings:
    """Each occasion is reported once, as one JSON object with `federation`, `event`, `facility`, `round` and `text`."""

    command: list[Line] = field(default_factory=list)
    """Program and arguments, run without a shell; the JSON object is its standard input. Empty: none."""
    webhook: Line = ""
    """`https://...` that the JSON object is posted to, or `file:PATH` of a file that holds this address, which keeps a
    secret address out of federation.yml. Empty: none."""
    on: list[Occasion] = field(default_factory=lambda: list(OCCASIONS))
    """Occasions: `done`, `stopped` (a person is needed), `stuck` (a job cannot start or is silent), `login` (refused or
    expired), `lost` (a facility's part of a round)."""

    def __post_init__(self) -> None:
        if self.webhook and not self.webhook.startswith("file:") and not is_private_address(self.webhook):
            raise ConfigurationError(
                "webhook is neither an https:// address nor a file:PATH that holds one", key="webhook"
            )

"""Addresses of servers: names of this machine, and what a person names, in which a name and a password may stand."""

from __future__ import annotations

import re

LOGIN = re.compile(r"(?<=//)[^/?#\s]*@")
"""What may come before the host of an address: a user, a token, a user and a password."""
HIDDEN = "***@"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names of this machine for itself."""


def without_login(address: str) -> str:
    """The address alone. A server that asks for a login answers it all the same, and says so."""
    return LOGIN.sub("", address)


def hidden_login(text: str) -> str:
    """A text for a terminal or a log, in whose addresses nobody reads a password."""
    return LOGIN.sub(HIDDEN, text)

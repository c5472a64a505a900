"""The error and the exit code of a request that the gate refuses."""

from __future__ import annotations

from facility.exchange.errors import InputError

CODE = 77
"""Exit code of a refused request (EX_NOPERM of sysexits.h)."""


class Refused(InputError):
    """A request that the grammar, the policy or the confinement to the working directory does not allow."""

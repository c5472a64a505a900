"""The error of a request that the gate refuses, which ends with `ExitCode.REFUSED`."""

from __future__ import annotations

from facility.exchange.errors import InputError


class Refused(InputError):
    """A request that the grammar, the policy or the confinement to the working directory does not allow."""

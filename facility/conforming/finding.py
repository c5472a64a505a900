"""What a conformance run says of one law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from facility.exchange.errors import CrossFedError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Whether a law is kept."""

    law: str
    kept: bool
    found: str = ""

    @property
    def line(self) -> str:
        return f"{'kept  ' if self.kept else 'BROKEN'}  {self.law}" + (f": {self.found}" if self.found else "")


def check_law(law: str, check: Callable[[], str]) -> Finding:
    """A law whose check raises where it is broken, and else returns what was found."""
    try:
        return Finding(law=law, kept=True, found=check())
    except (CrossFedError, OSError) as error:
        return Finding(law=law, kept=False, found=str(error))

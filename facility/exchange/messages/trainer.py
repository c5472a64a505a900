"""Which program trains: a key of federation.yml, of its facilities' entries, and of a facility's settings."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from facility.exchange.validation import validated

BUILT_IN = "facility.train"
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def _module(value: str) -> str:
    if not MODULE.fullmatch(value):
        raise ValueError("expected the name of a Python module, such as my_package.train")
    return value


@validated(frozen=True, kw_only=True)
class TrainerSettings:
    """The Python module that trains a round at a facility."""

    module: Annotated[str, AfterValidator(_module)] = BUILT_IN
    """Run as `python -m MODULE` on every rank, with the arguments and files of `facility.train`; installed in the
    facility's environment. `crossfed conformance MODULE` reports whether it keeps the contract."""

    @property
    def built_in(self) -> bool:
        return self.module == BUILT_IN

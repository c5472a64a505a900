"""What federation.yml says for a publication: people to cite, and what may be said of each facility."""

from __future__ import annotations

import re
from dataclasses import field

from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Line
from facility.exchange.validation import validated

ORCID = re.compile(r"(\d{4}-){3}\d{3}[\dX]")


@validated(frozen=True, kw_only=True)
class Creator:
    """One person."""

    name: Line
    """Name as it is to be cited."""
    orcid: Line = ""
    """Sixteen digits in four groups, such as 0000-0002-1825-0097."""
    affiliation: Line = ""
    """Name of the institution."""

    def __post_init__(self) -> None:
        if self.orcid and not (ORCID.fullmatch(self.orcid) and _check_digit(self.orcid)):
            raise ConfigurationError(
                f"orcid is {self.orcid!r}, expected four groups of four with a right check digit, such as "
                "0000-0002-1825-0097",
                key="orcid",
            )


@validated(frozen=True, kw_only=True)
class PublicSettings:
    """What may be published about a facility; nothing by default."""

    named: bool = False
    """Name the facility in model card and crate; otherwise it is `facility N`."""
    dataset_card: bool = False
    """Publish counts and digests of its dataset as a Croissant card; never its text."""
    languages: list[Line] = field(default_factory=list)
    """Languages of its data, as ISO 639 codes such as `it`."""
    license: Line = ""
    """SPDX identifier or address of its data's licence."""


def _check_digit(orcid: str) -> bool:
    """ISO 7064 MOD 11-2, as https://support.orcid.org/hc/en-us/articles/360006897674 describes it."""
    digits = orcid.replace("-", "")
    total = 0
    for digit in digits[:-1]:
        total = (total + int(digit)) * 2
    expected = (12 - total % 11) % 11
    return digits[-1] == ("X" if expected == 10 else str(expected))

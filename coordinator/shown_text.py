"""Text that a facility may have written, as one line that can be shown to a person"""

from __future__ import annotations

from facility.exchange.messages.strict_json import clean

LONGEST_SHOWN = 2000
"""Characters."""


def shown(text: object) -> str:
    """Text that may come from a facility, as one line of printable characters of limited length."""
    return clean(str(text), LONGEST_SHOWN)

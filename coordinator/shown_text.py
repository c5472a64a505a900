"""Text that a facility may have written, as one line that can be shown to a person"""

from __future__ import annotations

from facility.exchange.messages.strict_json import clean_text

LONGEST_SHOWN = 2000
"""Characters."""


def safe_line(text: object) -> str:
    """Text that may come from a facility, as one line of printable characters of limited length."""
    return clean_text(str(text), LONGEST_SHOWN)

"""On how many examples a law is tried: a quarter by default, all of them under CROSSFED_THOROUGH=1, as in CI."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("CROSSFED_THOROUGH", "0") == "1"


def examples(most: int) -> int:
    """`most` where tests are to be thorough, else a quarter of it."""
    return most if THOROUGH else max(1, most // 4)

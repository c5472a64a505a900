"""Cases of a law of which `make test` tries some and `make slow` the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Hashable], cases: Iterable[Hashable]) -> list[Any]:
    """All `cases` for `pytest.mark.parametrize`, marked slow but for those in `quick`, each of which must be one."""
    quick, cases = set(quick), list(cases)
    assert quick <= set(cases), quick - set(cases)
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in cases]

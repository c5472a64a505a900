"""`crossfed check` says how late updates may be, and warns where rounds will wait though they are not to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.waiting import check_waiting
from tests.federations import write_federation


@pytest.mark.parametrize(
    ("names", "rounds", "keep_rounds", "verdict"),
    [
        ("abcd", 3, 3, None),
        ("abcd", {"quorum": 1, "late": "drop"}, 3, None),
        ("abcd", {"quorum": 1, "grace": 0}, 3, "warning"),
        ("abcd", {"quorum": 1, "grace": 0}, 4, "ok"),
        ("abcd", {"quorum": 2, "grace": 0}, 3, "ok"),
        ("abcd", {"quorum": 1}, 3, "ok"),
        ("abcd", {"quorum": 1, "grace": 0}, 0, "ok"),
    ],
)
def test_rounds_that_keep_too_few_models_wait(
    tmp_path: Path, names: str, rounds: Any, keep_rounds: int, verdict: str | None
):
    described = {"count": 3, **rounds} if isinstance(rounds, dict) else rounds
    federation = read_federation(write_federation(tmp_path, list(names), rounds=described, keep_rounds=keep_rounds))
    assert [row.verdict for row in check_waiting(federation)] == ([verdict] if verdict else [])

"""`claims.sequence_tokens` beside the datasets: a limit below their blocks refuses honest updates in every round."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config.settings import ClaimSettings
from coordinator.preflight import check as checking
from coordinator.preflight.probe_answer import DatasetAnswer
from tests.federations import write_federation
from tests.preflight.answers import honest_answer

DATASETS = {
    "alpha": DatasetAnswer(block_tokens=16),
    "beta": DatasetAnswer(block_tokens=32),
    "lost": DatasetAnswer(error="missing"),
}


@pytest.mark.parametrize(
    ("claims", "named"),
    [
        ({"sequence_tokens": 4}, ["alpha", "beta"]),
        ({"sequence_tokens": 16, "action": "cap"}, ["beta"]),
        ({"sequence_tokens": 32}, []),
        ({"sequence_tokens": 0}, []),
        ({"sequence_tokens": 4, "action": "off"}, []),
    ],
)
def test_blocks_longer_than_claims_allow_are_named(claims: dict[str, object], named: list[str]):
    rows = checking.check_claims(ClaimSettings(**claims), DATASETS)
    assert [row.subject for row in rows] == named and all(row.verdict == "fail" for row in rows)


def test_check_says_so_before_a_job_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checking, "check_here", lambda *_: ([], None))
    monkeypatch.setattr(checking, "check_facility", lambda *_, **__: ([], honest_answer(DATASETS["alpha"])))
    rows = checking.check(write_federation(tmp_path, ["alpha"], claims={"sequence_tokens": 4}), link=False)
    (row,) = [row for row in rows if row.check == "claims"]
    assert "blocks have 16 tokens, claims.sequence_tokens allows 4" in row.found and "16 or more" in row.fix

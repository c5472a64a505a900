"""Every cause of failure ends in one sentence within half a minute, and the same command then recovers bit for bit.

The causes and how they are measured: `tests/engine/causes.py`. The table in docs/reference/faults.md comes of
`python -m tests.bench.faults --out docs/reference/faults.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.engine.causes import ALL, Cause, Prepared, measure, prepare
from tests.engine.noise import noise

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "faults.json"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("causes"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("causes")
@pytest.mark.parametrize(("step", "cause"), ALL, ids=[cause.name.replace(" ", "-") for _, cause in ALL])
def test_each_cause_is_told_and_the_same_command_recovers(prepared: Prepared, step: str, cause: Cause):
    if cause.mounts and os.geteuid():
        pytest.skip("mounts a file system, which needs root")
    assert not (wrong := measure(prepared, cause, step).wrong(prepared.start_seconds)), wrong


def test_the_table_of_the_documentation_holds_only_what_ends_in_a_sentence_and_recovers():
    rows = json.loads(TABLE.read_text())["rows"]
    known, shown = [cause.name for _, cause in ALL], [row["cause"] for row in rows]
    assert shown == [name for name in known if name in shown] and len(shown) >= 15
    assert all(row["seconds"] >= 0 and row["sentence"] and row["recovered"] for row in rows)
    assert not noise([row["sentence"] for row in rows]), "of the engine's own"

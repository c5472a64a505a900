"""Every cause of failure ends in one sentence within half a minute, and the same command then recovers bit for bit.

The causes and how they are measured: `tests/engine/causes.py`. The table in docs/reference/faults.md comes of
`python -m tests.bench.faults --out docs/reference/faults.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.causes import KILLED, REPORTING, STEPS, measure_all

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "faults.json"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_cause_is_told_and_the_same_command_recovers(tmp_path: Path):
    measured = measure_all(tmp_path)
    assert not (wrong := measured.wrong()), "\n\n".join(wrong)


def test_the_table_of_the_documentation_holds_only_what_ends_in_a_sentence():
    told = json.loads(TABLE.read_text())
    known = [*(cause.name for causes in STEPS.values() for cause in causes), KILLED.name, REPORTING.name]
    shown = [row["cause"] for row in told["rows"]]
    assert shown == [name for name in known if name in shown] and len(shown) >= 15 and told["same_weights"] is not False
    assert all(row["seconds"] >= 0 and row["sentence"] for row in told["rows"])

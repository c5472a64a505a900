"""Energy of real jobs of a federation, from recorded counters to the report and the card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.publishing.publish import publish
from coordinator.report.make import make_report
from tests.engine.engines import streamflow
from tests.federations import write_federation

RANGE = 262_143_328_850
"""Microjoules of RAPL's counter."""
RECORDED = {
    "slurm": {  # sacct -n -P -o ConsumedEnergyRaw: the job, its batch step, a step that is not known
        "begin": {"sacct.txt": "\n\n", "energy": "71350464 J 1700000000000000 us\n"},
        "end": {"sacct.txt": "540000\n539000\n18446744073709551614\n", "energy": "71999999 J 1700000600000000 us\n"},
    },
    "cray": {
        "begin": {"energy": "71350464 J 1700000000000000 us\n", "intel-rapl:0/energy_uj": "5000000\n"},
        "end": {"energy": "71530464 J 1700000600000000 us\n", "intel-rapl:0/energy_uj": "9000000\n"},
    },
    "linux": {  # the first package's counter begins anew, the core's is a part of its package's
        "begin": {"intel-rapl:0/energy_uj": f"{RANGE - 20_000_000}\n", "intel-rapl:0:0/energy_uj": "1\n"},
        "end": {"intel-rapl:0/energy_uj": "16000000\n", "intel-rapl:0:0/energy_uj": "15000000\n"},
    },
    "none": {"begin": {}, "end": {}},
}
EXPECTED = {"slurm": (540_000.0, "sacct"), "cray": (180_000.0, "pm_counters"), "linux": (36.0, "rapl"), "none": None}
"""Joules of a job and their source; the counters are as they were before in every round."""
KWH = 3.6e6
JOBS = 3
"""Of a facility: two rounds and the final evaluation."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_joules_of_jobs_are_in_the_round_files_the_report_and_the_card(tmp_path: Path):
    path = write_federation(tmp_path, list(RECORDED), license="apache-2.0", title="Measured", carbon_g_per_kwh=100.0)
    described = yaml.safe_load(path.read_text())
    for one in described["facilities"]:
        one["public"] = {"named": True}
    path.write_text(yaml.safe_dump(described))
    for name, moments in RECORDED.items():
        for moment, files in moments.items():
            folder = tmp_path / "sites" / name / "dataset" / "counters" / moment
            folder.mkdir(parents=True)
            for file, text in files.items():
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_text(text)
                if file.startswith("intel-rapl"):
                    (folder / file).with_name("max_energy_range_uj").write_text(f"{RANGE}\n")
                    (folder / file).with_name("name").write_text("package-0\n")
    write_rendered(read_federation(path))
    tool = tmp_path / "cwl" / "tools" / "train.cwl"
    tool.write_text(tool.read_text().replace("facility.round", "tests.rounds.metered", 1))
    result = streamflow(path, tmp_path / "engine", timeout=250)
    assert result.returncode == 0, result.stdout[-4000:]

    for entry in Archive(read_federation(path).archive_path).history():
        for row in entry.facilities:
            told = (row.usage["energy_joules"], row.usage["energy_source"]) if "energy_joules" in row.usage else None
            assert told == EXPECTED[row.facility], (entry.round, row.facility)
    data = json.loads(make_report(path, tmp_path / "report.json", "json").read_text())
    for name, expected in EXPECTED.items():
        found = data["cost"]["facilities"][name]
        kwh = None if expected is None else JOBS * expected[0] / KWH
        assert found["kwh"] == (None if kwh is None else pytest.approx(kwh, abs=1e-6)), name
        assert found["co2e_kg"] == (None if kwh is None else pytest.approx(0.1 * kwh, abs=1e-6)), name
    assert data["cost"]["total"]["energy_over"] == ["slurm", "cray", "linux"]
    for text in (
        make_report(path, tmp_path / "report.md", "md").read_text(),
        ModelCard.load(publish(path, tmp_path / "out") / "model" / "README.md").text,
    ):
        lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
        assert "0.45" in lines["slurm"] and "sacct" in lines["slurm"] and "pm_counters" in lines["cray"]
        assert "rapl" in lines["linux"] and "no" in lines["none"]

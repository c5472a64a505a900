"""Rendering is deterministic, complete, and the shipped files are what it gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from streamflow.config.validator import SfValidator
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.deployments import federation_of
from coordinator.config.federation import read_federation
from coordinator.config.local_paths import check_paths
from coordinator.engine.render import facility_settings, render, stale_files, write_rendered
from coordinator.preflight.coordinator import check_here
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files import paths
from facility.exchange.messages.sync import EmulationSettings
from tests.conftest import ROOT
from tests.federations import write_federation

SHIPPED = ROOT / "workflow" / "federation.yml"


def test_shipped_files_equal_a_fresh_rendering():
    for name, text in render(read_federation(SHIPPED)).items():
        assert (ROOT / name).read_text() == text, f"{name} is stale: run `make render`"


def test_rendering_twice_changes_nothing(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    assert len(write_rendered(federation)) > 5
    assert write_rendered(federation) == []
    assert stale_files(federation) == []


def test_of_a_facility_that_is_gone_what_was_rendered_is_removed_and_nothing_else(tmp_path: Path):
    """Every other jobs/*.sh and facilities/*.json beside a federation.yml was deleted, a person's own with them."""
    file = write_federation(tmp_path, ["a", "b"])
    write_rendered(read_federation(file))
    for name in ("jobs/b.sh", "jobs/b-login.sh", "jobs/a-login.sh", "jobs/mine.sh", "facilities/mine.json"):
        (file.parent / name).parent.mkdir(exist_ok=True)
        (file.parent / name).write_text("{}")
    (tmp_path / "other").mkdir()
    file.write_text(write_federation(tmp_path / "other", ["a"]).read_text())
    result = CliRunner().invoke(app, ["render", "--no-paths", "-f", str(file)])
    assert result.exit_code == 0 and " files written, 4 removed\n" in result.output
    assert "b.json (removed:" in result.output
    left = {path.relative_to(file.parent).as_posix() for path in file.parent.glob("*/*")}
    assert {"jobs/mine.sh", "facilities/mine.json", "facilities/a.json"} == left


def test_cwl_of_another_version_and_cwl_that_was_cut_off_is_replaced_by_what_ships(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A federation in a folder of its own kept the tools of the CrossFed that had made it, under a workflow rendered by
    a newer one; a copy that a kill had cut off stayed so for ever."""
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    write_rendered(federation)
    tools = tmp_path / "cwl" / "tools"
    shipped = (tools / "aggregate.cwl").read_text()
    earlier = "".join(line for line in shipped.splitlines(keepends=True) if "scores" not in line)
    assert earlier != shipped
    (tools / "aggregate.cwl").write_text(earlier)
    (tools / "send.cwl").write_text("")
    assert stale_files(federation) == ["cwl/tools/send.cwl", "cwl/tools/aggregate.cwl"]
    assert write_rendered(federation) == [tools / "send.cwl", tools / "aggregate.cwl"]
    assert (tools / "aggregate.cwl").read_text() == shipped == (ROOT / "cwl" / "tools" / "aggregate.cwl").read_text()
    assert (tools / "aggregate.cwl.old").read_text() == earlier, "what a person had edited is not lost"
    assert f"it is now {tools / 'aggregate.cwl.old'}" in caplog.text
    assert stale_files(federation) == [] and write_rendered(federation) == []


OWN = {
    "workflow/streamflow.yml": "version: v1.0\n",
    "workflow/settings.yml": "database: {host: db}\n",
    "workflow/coordinator.json": "[1]",
    "workflow/jobs/a.sh": "#!/bin/bash\n",
    "workflow/facilities/a.json": '{"facility": "a"}',
    "cwl/round.cwl": "cwlVersion: v1.2\n",
}


@pytest.mark.parametrize("name", OWN)
def test_a_file_of_ones_own_is_never_replaced(tmp_path: Path, name: str):
    file = write_federation(tmp_path, ["a", "b"])
    described = yaml.safe_load(file.read_text())
    template = {"type": "slurm", "workdir": "/w", "template": "slurm", "fill": {"account": "x", "partition": "y"}}
    described["facilities"][0]["deployment"] = template
    file.write_text(yaml.safe_dump(described))
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text(OWN[name])
    federation = read_federation(file)
    with pytest.raises(InputError, match=f"{re.escape(name)} was not rendered by CrossFed.*move it away"):
        write_rendered(federation)
    row = next(row for row in check_here(federation)[0] if row.check == "rendered files")
    assert row.verdict == "fail" and str(own) in row.found
    assert own.read_text() == OWN[name] and not [path for path in tmp_path.glob("cwl/tools/*")]
    own.unlink()
    assert write_rendered(federation) and write_rendered(federation) == []
    (tmp_path / "workflow" / "settings.yml").write_text((tmp_path / "workflow" / "settings.yml").read_text() + "#\n")
    assert len(write_rendered(federation)) == 1, "what was rendered is rendered again"


def test_a_check_before_the_first_rendering_warns_of_nothing(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))

    def verdict() -> str:
        return next(row.verdict for row in check_here(federation)[0] if row.check == "rendered files")

    assert verdict() == "ok"
    write_rendered(federation)
    assert verdict() == "ok"
    (tmp_path / "workflow" / "facilities" / "a.json").unlink()
    assert verdict() == "warning", "what was rendered is not whole any more"


def test_a_template_where_its_rendering_belongs_stays_a_template(tmp_path: Path):
    """It would be read again with its own placeholders filled, and lose them."""
    file = write_federation(tmp_path, ["a"])
    write_rendered(read_federation(file))
    described = yaml.safe_load(file.read_text())
    described["facilities"][0]["deployment"] = {"type": "slurm", "workdir": "/w", "template": "jobs/a.sh"}
    file.write_text(yaml.safe_dump(described))
    (file.parent / "jobs").mkdir()
    (file.parent / "jobs" / "a.sh").write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    with pytest.raises(InputError, match="jobs/a.sh was not rendered"):
        write_rendered(read_federation(file))


def test_the_rendering_does_not_depend_on_where_the_checkout_lies():
    text = "".join(render(read_federation(SHIPPED)).values())
    assert str(ROOT) not in text


def test_no_javascript_anywhere():
    texts = [path.read_text() for path in (ROOT / "cwl").rglob("*.cwl")]
    assert len(texts) == 15
    for text in texts:
        assert "InlineJavascript" not in text and "${" not in text
        for expression in re.findall(r"\$\((.*?)\)", text):
            assert re.fullmatch(r"(self|inputs)(\[\d+\]|\.\w+)+", expression), expression


def test_a_third_facility_is_at_most_ten_lines_in_one_file(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    before = read_federation(path)
    write_rendered(before)
    hand_written = {p: p.read_bytes() for p in (tmp_path / "cwl").rglob("*.cwl") if p.name != "round.cwl"}
    addition = "- name: third-site.3\n  dataset: ../sites/third/dataset\n"
    text = path.read_text()
    text = text.rstrip() + "\n" + addition if text.rstrip().splitlines()[-1].startswith(("  ", "-")) else text
    assert text.endswith(addition) and addition.count("\n") <= 10
    path.write_text(text)
    write_rendered(read_federation(path))
    steps = yaml.safe_load((tmp_path / "cwl" / "round.cwl").read_text())["steps"]
    assert {"train_third-site.3", "receive_third-site.3"} <= set(steps)
    assert all(p.read_bytes() == content for p, content in hand_written.items())


def test_a_facility_that_goes_takes_its_settings_along(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    write_rendered(read_federation(path))
    described = yaml.safe_load(path.read_text())
    described["facilities"].pop()
    path.write_text(yaml.safe_dump(described))
    write_rendered(read_federation(path))
    assert [p.name for p in (path.parent / "facilities").iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("names", "changes", "states"),
    [
        ("abc", {}, True),
        ("ab", {}, False),
        ("ab", {"aggregation": {"clip_norm": 1.0}}, True),
        ("abc", {"aggregation": {"rule": "krum"}}, False),
        ("abc", {"training": {"encoding": "delta-int8", "export_dtype": "float32"}}, True),
        ("abc", {"training": {"lora": {"rank": 2}}}, True),
        ("abc", {"training": {"lora": {"rank": 2}}, "aggregation": {"lora": "product"}}, False),
    ],
)
def test_norms_are_stated_where_they_save_the_coordinator_a_reading(
    tmp_path: Path, names: str, changes: dict[str, Any], states: bool
):
    federation = read_federation(write_federation(tmp_path, list(names), **changes))
    settings = json.loads(render(federation)["workflow/facilities/a.json"])
    assert settings.get("step_norms", False) is states


def test_every_dataset_travels_as_text(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    files = render(federation)
    inputs = yaml.safe_load(files["workflow/settings.yml"])
    assert [type(entry["dataset"]) for entry in inputs["facilities"]] == [str, str]
    train = yaml.safe_load((ROOT / "cwl" / "tools" / "train.cwl").read_text())
    assert train["inputs"]["dataset"]["type"] == "string"


def test_paths_of_several_directories_are_quoted_in_a_step_s_command():
    """StreamFlow leaves those of a list bare unless the tool asks for quotes; a folder's name may hold a blank."""
    bindings = [
        binding["inputBinding"]
        for tool in (ROOT / "cwl" / "tools").glob("*.cwl")
        for binding in yaml.safe_load(tool.read_text())["inputs"].values()
        if str(binding["type"]).endswith("[]")
    ]
    assert bindings and all(binding.get("shellQuote") is True for binding in bindings)


def test_the_home_folder_in_a_local_facility_s_work_directory_is_written_out(tmp_path: Path, monkeypatch):
    """StreamFlow would make a folder named `~`."""
    monkeypatch.setenv("HOME", "/home/zoe")
    path = write_federation(tmp_path, ["a"])
    path.write_text(path.read_text().replace("- name: a\n", "- name: a\n  deployment: {workdir: ~/work}\n"))
    written = yaml.safe_load(render(read_federation(path))["workflow/streamflow.yml"])
    assert "/home/zoe/work" in [one["workdir"] for one in written["deployments"].values()]


def test_checkpoint_manager_is_never_enabled(tmp_path: Path):
    text = render(read_federation(write_federation(tmp_path, ["a"])))["workflow/streamflow.yml"]
    assert "checkpointManager" not in text


@pytest.mark.parametrize("name", ["demo", "Demo", "2026-a", "crossfed-Demo"])
def test_streamflow_accepts_every_name_that_we_accept(tmp_path: Path, name: str):
    federation = read_federation(write_federation(tmp_path, ["A", "2nd.site"], name=name))
    written = yaml.safe_load(render(federation)["workflow/streamflow.yml"])
    SfValidator().validate(written)
    assert [federation_of(workflow) for workflow in written["workflows"]] == [name]


def test_paths_in_settings_are_those_of_the_machine_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = {"layout": {"plan": "~/plan.json"}, "lora": {"base": "../base"}, "sync": {"emulation": {"trace": "/t.json"}}}
    keys |= {"preference": {"reference": "../reference"}}
    path = write_federation(tmp_path, ["here", "far"], training=keys)
    described = yaml.safe_load(path.read_text())
    described["facilities"][1]["deployment"] = {"type": "ssh", "host": "h", "workdir": "/w"}
    path.write_text(yaml.safe_dump(described))
    files = render(read_federation(path))

    def found(name: str) -> list[str]:
        training = json.loads(files[f"workflow/facilities/{name}.json"])["training"]
        named = [training["layout"]["plan"], training["lora"]["base"], training["sync"]["emulation"]["trace"]]
        return [*named, training["preference"]["reference"]]

    assert found("here") == [
        str(tmp_path / "plan.json"),
        str(tmp_path / "base"),
        "/t.json",
        str(tmp_path / "reference"),
    ]
    assert found("far") == ["~/plan.json", "../base", "/t.json", "../reference"]


@pytest.mark.parametrize(
    ("training", "brings", "told"),
    [
        ({"lora": {"rank": 2}}, False, "base"),
        ({"lora": {"rank": 2}}, True, ""),
        ({}, False, ""),
        ({"lora": {"rank": 2}, "preference": {"reference": "sites"}}, False, "sites"),
        ({"lora": {"rank": 2}, "preference": {"reference": "base"}}, True, "base"),
    ],
)
def test_preferences_are_measured_from_beneath_adapters_that_no_initial_model_brings(
    tmp_path: Path, training: dict[str, Any], brings: bool, told: str
):
    file = write_federation(tmp_path, ["a"], training=training)
    (tmp_path / "workflow/sites").mkdir()
    if brings:
        (tmp_path / "model/adapter_config.json").write_text("{}")
    federation = read_federation(file)
    check_paths(federation)
    (one,) = federation.facilities
    found = json.loads(facility_settings(federation, one))["training"]["preference"]["reference"]
    assert Path(found).name == told


def test_without_adapters_there_is_nothing_beneath_them(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="'base' without lora"):
        read_federation(write_federation(tmp_path, ["a"], training={"preference": {"reference": "base"}}))


def test_keys_and_signers_are_relative_to_federation_yml_as_other_paths_are(tmp_path: Path):
    """They counted from the checkout: no update was taken, and no message said where the file was looked for from."""
    names = ["alpha", "beta", "gamma"]
    file = write_federation(
        tmp_path,
        names,
        training={"export_dtype": "float32", "signing_key": "../keys/own"},
        aggregation={"rule": "mean", "clip_ratio": 0, "allowed_signers": "../keys/signers"},
        privacy={"secure_aggregation": True, "peer_signers": "../keys/peers"},
    )
    there = "  deployment: {type: ssh, host: h, user: u, workdir: /scratch/cf}\n"
    text = file.read_text().replace("- name: gamma\n", f"- name: gamma\n{there}")
    file.write_text(text.replace("../sites/gamma/dataset", "/data/gamma"))
    files = {Path(name).name: text for name, text in render(read_federation(file)).items()}
    assert json.loads(files["coordinator.json"])["aggregation"]["allowed_signers"] == str(tmp_path / "keys" / "signers")
    local, remote = json.loads(files["alpha.json"]), json.loads(files["gamma.json"])
    assert local["training"]["signing_key"] == str(tmp_path / "keys" / "own")
    assert local["masking"]["peer_signers"] == str(tmp_path / "keys" / "peers")
    assert remote["training"]["signing_key"] == "../keys/own", "another machine's paths stay as they were written"
    assert remote["masking"]["peer_signers"] == "../keys/peers"


def test_a_trace_is_read_from_the_accounts_home_and_from_crossfeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trace.json").write_text('{"format": 1, "workers": {"0": [[0, 2]]}}')
    monkeypatch.setenv("CROSSFED_HOME", str(tmp_path))
    monkeypatch.setattr(paths, "account_home", lambda: tmp_path)
    for trace in ("trace.json", "~/trace.json", str(tmp_path / "trace.json")):
        assert EmulationSettings(trace=trace).build().factor(0) == 2


def test_a_federation_file_in_a_folder_of_its_own_is_rendered_without_leaving_it(tmp_path: Path):
    """Only `workflow/` has a `cwl/` beside it; another folder keeps everything that is rendered."""
    path = write_federation(tmp_path / "made", ["a"])
    bare = tmp_path / "mine" / "federation.yml"
    bare.parent.mkdir()
    bare.write_text(path.read_text().replace("../", "../made/"))
    before = set(tmp_path.iterdir())
    changed = write_rendered(read_federation(bare))
    assert set(tmp_path.iterdir()) == before and all(file.is_relative_to(bare.parent) for file in changed)
    assert stale_files(read_federation(bare)) == []
    described = yaml.safe_load((bare.parent / "streamflow.yml").read_text())
    (workflow,) = described["workflows"].values()
    assert (bare.parent / workflow["config"]["file"]).resolve() == bare.parent / "cwl" / "main.cwl"
    assert (bare.parent / "cwl" / "round.cwl").read_text() == render(read_federation(bare))["mine/cwl/round.cwl"]


@pytest.mark.parametrize("place", ["federation.yml", "its folder"])
def test_a_check_warns_where_every_user_may_decide_what_is_run(tmp_path: Path, place: str):
    """As a umask of 000 leaves folders, and some file systems all files."""
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    assert not [row for row in check_here(federation)[0] if row.check == "permissions"]
    path = federation.file if place == "federation.yml" else federation.file.parent
    path.chmod(path.stat().st_mode | 0o002)
    (row,) = [row for row in check_here(federation)[0] if row.check == "permissions"]
    assert row.verdict == "warning" and f"every user of this host may write {path}," in row.found
    assert f"chmod o-w {path}" in row.fix

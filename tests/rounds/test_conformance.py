"""Trainers of one's own: the examples keep the contract, and of a trainer that breaks it the broken law is named."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.config.federation import Facility, read_federation
from coordinator.conformance import check_conformance as tried_at_the_coordinator
from coordinator.conformance import refused_updates
from coordinator.engine.render import render
from coordinator.preflight.facility import probe_facility
from coordinator.preflight.probe_answer import ProbeAnswer
from facility.conformance import main as conformance
from facility.conforming.laws import refuses
from facility.conforming.trial import Ended
from facility.contract import Call, read_call
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.manifest import Manifest, verify_manifest
from facility.exchange.messages.outcome import ENDING
from facility.exchange.messages.progress import FILE as PROGRESS
from facility.exchange.messages.progress import read_progress
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.exchange.messages.trainer import TrainerSettings
from facility.selfcheck import main as self_check
from facility.selfcheck import make_material, trial_settings
from tests.conftest import ROOT
from tests.distributed import Started
from tests.engine.harms import flipped
from tests.federations import write_federation
from tests.forked_trainers import variables

EXAMPLES = ROOT / "examples"
STAND_IN = "tests.stand_in_trainer"


def laws_kept(module: str, place: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, bool]:
    code = conformance([module, "--json", "--keep", str(place)])
    laws = {finding["law"]: finding["kept"] for finding in json.loads(capsys.readouterr().out)}
    assert code == int(not all(laws.values()))
    return laws


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("module", ["plain_torch_trainer", "hugging_face_trainer", "facility.train"])
def test_the_examples_and_our_own_trainer_keep_the_contract(module: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(ROOT)]))
    laws = laws_kept(module, tmp_path / "trial", capsys)
    assert all(laws.values()), laws
    assert len(laws) == 17, "two more are tried after the signal, which must find the round at work"
    assert refused_updates(tmp_path / "trial") == []
    if (file := EXAMPLES / f"{module}.py").is_file():
        assert len(file.read_text().splitlines()) <= 70


@pytest.mark.slow
def test_a_trainer_that_trains_nothing_breaks_that_law_and_no_other_of_its_rounds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    laws = laws_kept(STAND_IN, tmp_path / "trial", capsys)
    # It reports no step, so it is interrupted after a time: how far it is then depends on the machine.
    by_chance = ("SIGTERM ends it", "the same command then ends", "with the weights of a round that nothing stopped")
    broken = {law for law, kept in laws.items() if not kept and not law.startswith(by_chance)}
    assert broken == {"training changes the weights", "without training it"} | {
        law
        for law in laws
        if "is refused" in law  # it has no exit code for them
    }
    assert refused_updates(tmp_path / "trial") == []
    weights = next((tmp_path / "trial/first/update").glob("*.safetensors"))
    weights.write_bytes(flipped(weights.read_bytes()))
    assert "round 0" in refused_updates(tmp_path / "trial")[0]


def test_a_trainer_that_delivers_nothing_ends_the_trial_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STAND_IN", "nothing")
    laws = laws_kept(STAND_IN, tmp_path / "trial", capsys)
    assert laws == {
        "round 0 ends with exit code 0": True,
        "the update has a manifest of its round over its files": False,
    }


@pytest.mark.parametrize(("code", "leaves"), [(0, False), (1, False), (2, True)])
def test_a_trainer_that_takes_a_model_that_it_must_refuse_is_told_the_exit_code_that_is_expected(
    code, leaves, tmp_path
):
    update = tmp_path / "update"
    if leaves:
        update.mkdir()
    with pytest.raises(InputError, match=f"it ended with {code}.*expected 2"):
        refuses(Ended(code=code, said="", update=update, seconds=1.0))


@pytest.mark.parametrize("keep", ["--keep={}", "--keep {}", "--ke {}"])
def test_the_coordinator_reads_the_trials_arguments_as_the_trial_does(keep, tmp_path, monkeypatch, capfd):
    """The trial's updates are where --keep names, in whichever spelling; --json alone is on stdout. The trial is
    carried out here, which imports nothing again; that it is a process of its own, the next test says."""

    def here(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, "-m", "facility.conformance"] and not check
        return subprocess.CompletedProcess(command, conformance(command[3:]))

    monkeypatch.setattr("coordinator.conformance.subprocess", SimpleNamespace(run=here))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STAND_IN", "nothing")
    place = tmp_path / "trial"
    assert tried_at_the_coordinator([STAND_IN, "--json", *keep.format(place).split()]) == 1
    assert len(json.loads(capfd.readouterr().out)) == 2
    assert (place / "first").is_dir()


def test_the_trial_is_a_process_whose_output_and_exit_code_are_those_of_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert tried_at_the_coordinator([STAND_IN, "--help"]) == 0
    assert capfd.readouterr().out.startswith("usage: python -m facility.conformance")
    assert tried_at_the_coordinator([STAND_IN, "--limit", "0", "--keep", str(tmp_path / "trial")]) == 2
    assert "--limit is 0 s" in capfd.readouterr().err and not (tmp_path / "trial").exists()


def test_a_folder_to_keep_that_is_not_named_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        tried_at_the_coordinator([STAND_IN, "--keep"])
    assert "--keep: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([STAND_IN, "--limit", "0"], "--limit is 0 s"),
        ([STAND_IN, "--limit", "nan"], "--limit is nan s"),
        ([STAND_IN, "--ranks", "0"], "ranks is 0"),
        (["examples/plain_torch_trainer.py"], "name of a Python module"),
    ],
)
def test_what_no_trial_can_be_made_of_is_refused_before_it_begins(arguments, said, tmp_path):
    """It left the folder to keep, so that the corrected command was refused."""
    with pytest.raises(InputError, match=said):
        conformance([*arguments, "--keep", str(tmp_path / "kept" / "trial")])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("word", "said"), [("--ranks", "ranks is 0"), ("--limit", "--limit is 0 s")])
def test_a_self_check_that_cannot_be_made_leaves_nothing(word, said, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["selfcheck", "--home", str(tmp_path), word, "0"])
    with pytest.raises(InputError, match=said):
        self_check()
    assert not list(tmp_path.iterdir())


def test_a_round_runs_the_module_that_the_settings_name(tmp_path: Path):
    (tmp_path / "job").mkdir()
    make_material(tmp_path, trial_settings(1))
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"trainer": {"module": STAND_IN}}))
    words = ["--model", "../model", "--dataset", str(tmp_path / "data"), "--settings", "../settings.json"]
    words += ["--round", "0", "--out", "update", "--state", str(tmp_path / "state")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = Started("facility.round", words, tmp_path / "said", environment, directory=tmp_path / "job").ended()
    assert result.returncode == 0, result.stderr
    assert verify_manifest(tmp_path / "job/update").kind == "update"
    assert not (tmp_path / "state/round-0").exists()  # the stand-in keeps nothing; facility.train would


def test_a_trainer_may_report_a_loss_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_material(tmp_path, trial_settings(1))
    monkeypatch.chdir(tmp_path)
    words = ["--model", "model", "--dataset", "data", "--settings", "settings.json", "--round", "0"]
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        call = read_call([*words, "--out", "update", "--state", "state"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for step, (loss, told) in enumerate([(2.5, 2.5), (math.nan, None), (math.inf, None)], 1):
        call.report_step(step, loss)
        found = read_progress((tmp_path / PROGRESS).read_text())
        assert (found.step, found.loss) == (step, told)


def test_a_progress_file_that_cannot_be_written_does_not_end_a_trainers_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / PROGRESS).mkdir()  # as a full disk, it takes no file of this name
    call = Call(
        model=tmp_path,
        base=Manifest(kind="model", federation="f", round=0),
        dataset=tmp_path,
        settings=FacilitySettings(federation="f", facility="n", rounds=1, seed=0),
        round=0,
        out=tmp_path / "update",
        state=tmp_path / "state",
        signals=[],
    )
    call.report_step(1, 2.5)
    assert "step 1/" in capsys.readouterr().out and call.stepped


@pytest.mark.parametrize("module", ["../train.py", "a b", "train;ls", "-m", "", "é.train"])
def test_a_module_is_a_name_and_not_a_path_or_an_option(tmp_path: Path, module: str):
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps({"federation": "f", "facility": "n", "rounds": 1, "seed": 0, "trainer": {"module": module}})
    )
    with pytest.raises(ConfigurationError, match="name of a Python module"):
        read_facility_settings(file)


def test_a_facilitys_own_trainer_goes_before_the_federations_and_moments_stay_personal(tmp_path: Path):
    path = write_federation(tmp_path, ["north", "south", "east"])
    assert "trainer" not in json.loads(settings_of(path, "north"))
    shared = read_federation(path).facilities[0].training.optimizer_state
    text = path.read_text().replace("- name: south\n", "- name: south\n  trainer: {module: my.own}\n")
    path.write_text(text)
    found = {name: json.loads(settings_of(path, name)) for name in ("north", "south")}
    assert "trainer" not in found["north"] and found["south"]["trainer"] == {"module": "my.own"}
    assert shared == "shared" and {one["training"]["optimizer_state"] for one in found.values()} == {"personal"}
    path.write_text("trainer: {module: all.of.us}\n" + text)
    assert [json.loads(settings_of(path, name))["trainer"]["module"] for name in ("north", "south")] == [
        "all.of.us",
        "my.own",
    ]
    path.write_text(text.replace("training:\n", "training:\n  optimizer_state: shared\n", 1))
    with pytest.raises(ConfigurationError, match=r"yml:8: .*'south' has a trainer of its own"):
        read_federation(path)


def settings_of(path: Path, facility: str) -> str:
    files = render(read_federation(path))
    return next(str(text) for name, text in files.items() if str(name).endswith(f"facilities/{facility}.json"))


def test_the_probe_reports_a_trainer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    for name, value in variables().items():
        monkeypatch.setenv(name, value)
    deployment = Facility(name="here", dataset="d").deployment
    answers = {}
    for module in (STAND_IN, "tests.no_such_trainer", "no_such_package.train"):
        answer = probe_facility(deployment, "/nowhere", "/tmp", 0, TrainerSettings(module=module))
        assert isinstance(answer, ProbeAnswer), answer
        answers[module] = answer.trainer
    assert answers.pop(STAND_IN) == "" and all(said and "No module named" in said for said in answers.values())
    answer = probe_facility(deployment, "/nowhere", "/tmp", 0, TrainerSettings())
    assert isinstance(answer, ProbeAnswer) and answer.trainer is None and answer.clock == 0.0

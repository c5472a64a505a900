"""Quickstart from first to last: the same command goes on, and what it adds to a file leaves the rest as it was."""

from __future__ import annotations

import dataclasses
import io
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from coordinator.config.deployments import Deployment
from coordinator.config.federation import read_federation
from coordinator.preflight import check
from coordinator.preflight.last_check import remember_failures, still_failing
from coordinator.preflight.row import Row, fail, ok
from coordinator.quickstart import begin as beginning
from coordinator.quickstart import host_keys
from coordinator.quickstart.begin import Request, begin
from coordinator.quickstart.command import quickstart
from coordinator.quickstart.describe import RoundTraining
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.survey import Place, Python, Survey
from facility.exchange.errors import InputError, TransientError
from facility.exchange.messages.manifest import sha256_of
from tests.federations import write_federation
from tests.training.federation import write_dataset

PLACES = (Place(name="HOME", path="/home/u", free=10**12),)
PYTHONS = (Python(command="python3", version=(3, 12), lacks=()),)
FINGERPRINT = "SHA256:" + "a" * 43


@pytest.mark.parametrize("prepared", [True, False])
def test_the_same_command_prepares_the_same_again(prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Text is prepared, which finds a dataset that it made; a dataset that was prepared before never is."""
    data = tmp_path / "data"
    write_dataset(data) if prepared else data.write_text("text")
    texts: list[str] = []

    def equip(federation: Any, facility: Any, survey: Any, text: str, *rest: Any) -> int:
        texts.append(text)
        return 64

    monkeypatch.setattr(beginning, "equip", equip)
    monkeypatch.setattr(beginning, "share_tokenizer", lambda *_, **__: [])
    monkeypatch.setattr(beginning, "model_figures", lambda _: SimpleNamespace(positions=16))
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    request = Request(
        folder=tmp_path / "fed",
        name="heron",
        facilities={"here": "local"},
        model="demo",
        data={"here": str(data)},
        plan=RoundTraining(rounds=1),
        block_tokens=16,
    )
    for _ in range(2):
        begin(request, Dialog(given={}, yes=True))
    assert texts == ["" if prepared else str(data)] * 2


def made(folder: Path, **further: Any) -> Request:
    """A request for two facilities of this machine, over a text that exists."""
    (folder / "text").write_text("text")
    logins = {"here": "local", "too": "local"}
    plan = RoundTraining(rounds=1)
    stated = {"folder": folder / "fed", "name": "heron", "model": "demo", "plan": plan, "set_up": False}
    return Request(**stated | {"facilities": logins, "data": dict.fromkeys(logins, str(folder / "text"))} | further)


def test_an_option_for_a_facility_that_there_is_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--data` and `--key` of a misspelt name were passed over; given again, so was `--facility` of another."""
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    dialog = Dialog(given={}, yes=True)
    texts = made(tmp_path).data
    for wrong in ({"data": {**texts, "her": "text"}}, {"keys": {"": "key", "her": "key"}}):
        with pytest.raises(InputError, match=r"her=\.\.\.: the facilities are here, too$"):
            begin(made(tmp_path, **wrong), dialog)
    assert not (tmp_path / "fed").exists()
    begin(made(tmp_path, keys={"": "key"}), dialog)
    for wrong in ({"data": {**texts, "her": "text"}}, {"facilities": {"here": "local", "her": "local"}}):
        with pytest.raises(InputError, match="her=.*are here, too; they are those of .*federation.yml: edit it"):
            begin(made(tmp_path, **wrong), dialog)
    begin(made(tmp_path, facilities={"here": "local"}, data={}), dialog)


@pytest.mark.parametrize("name", ["global", "Here", "here-ssh", "engine", "two words"])
def test_a_name_that_federation_yml_would_refuse_is_refused_before_a_site_is_asked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The sites were asked and a model made, and what was written was then refused by every later command."""
    monkeypatch.setattr(beginning, "_facility", lambda *_: pytest.fail("a site is asked"))
    with pytest.raises(InputError, match=f"facility .*{name}"):
        begin(made(tmp_path, facilities={"here": "local", name: "local"}, data={}), Dialog(given={}, yes=True))
    assert not (tmp_path / "fed").exists()


def test_an_answer_to_no_question_is_refused_before_a_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was found after the download; the answer to the last question, `set-up`, counted as one to none."""
    models: list[str] = []
    monkeypatch.setattr(beginning, "_model", lambda _, source: models.append(source) or tmp_path / "fed" / "model")
    with pytest.raises(InputError, match=r"here\.partitoin answers no question"):
        begin(made(tmp_path, model=""), Dialog(given={"model": "demo", "here.partitoin": "x"}, yes=True))
    assert not models and not (tmp_path / "fed").exists()
    monkeypatch.setattr(beginning, "equip", lambda *_: pytest.fail("it is set up"))
    begin(made(tmp_path, set_up=True), Dialog(given={"set-up": "no"}, yes=True))
    assert models == ["demo"] and (tmp_path / "fed" / "workflow" / "federation.yml").is_file()


def test_an_input_that_ends_is_an_error_that_names_the_question(tmp_path: Path):
    """Without a terminal the command ended by itself, with the code of Ctrl-C and without a word."""

    def ends(_: str) -> str:
        raise EOFError

    with pytest.raises(InputError, match="model has no answer, .*: give --answer model=VALUE, or --yes"):
        begin(made(tmp_path, model=""), Dialog(given={}, yes=False, ask_line=ends))


def test_what_was_typed_before_an_error_can_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An input that ends at the last question of many took all answers with it."""
    (tmp_path / "a text").write_text("text")
    answers = f"here=local\n\n{tmp_path}/a text\n{tmp_path}/no-model\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    with pytest.raises(InputError, match="model has no answer, for the input has ended"):
        quickstart(tmp_path / "fed", set_up=False)
    kept = capsys.readouterr().err.split("corrected: ")[1].strip()
    words = shlex.split(kept)
    assert words[::2] == ["--answer"] * 2
    assert words[1::2] == ["facility-1=here=local", f"here.data={tmp_path}/a text"]
    mended = [*words[1::2], f"model={tmp_path}/model"]
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    monkeypatch.setattr(check, "_check", lambda *_, **__: [ok("federation", "x", "y")])
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(typer.Exit):
        quickstart(tmp_path / "fed", set_up=False, answer=mended)
    assert (tmp_path / "fed" / "workflow" / "federation.yml").is_file()


def test_the_answers_are_kept_where_a_person_stops_at_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Typed(io.StringIO):
        def readline(self, size: int = -1) -> str:  # type: ignore[override]
            if line := super().readline(size):
                return line
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Typed("here=local\n\n"))
    with pytest.raises(KeyboardInterrupt):
        quickstart(tmp_path / "fed", set_up=False)
    assert "corrected: --answer facility-1=here=local" in capsys.readouterr().err


def asked(lines: list[str], **given: str) -> tuple[Dialog, list[str]]:
    """A dialog at whose terminal these lines are typed, and what it says."""
    typed, said = iter(lines), []
    return Dialog(given=given, yes=False, say=said.append, ask_line=lambda _: next(typed)), said


def test_an_answer_that_cannot_be_used_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A relative path was found when the model had been made, and then stood in a federation.yml that nothing read;
    others ended the command."""
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    monkeypatch.setattr(beginning, "_connect", lambda *_, **__: None)
    surveys = {"no.txt": Survey(), "data/x": Survey(data="prepared")}
    surveys |= {"text.txt": Survey(data="text", pythons=PYTHONS, places=PLACES)}
    monkeypatch.setattr(beginning, "ask_site", lambda name, login, data: surveys[data])
    lines = ["far", "far=far.example.org:99999", "far=far.example.org", "far=here", "near=local", ""]
    lines += ["no.txt", "data/x", "text.txt", "crossfed", "", "~/work", ""]
    lines += [str(tmp_path / "none"), str(tmp_path / "text"), "demo"]
    dialog, said = asked(lines)
    file = begin(made(tmp_path, facilities={}, data={}, model=""), dialog)
    far, near = read_federation(file).facilities
    assert (far.deployment.workdir, far.deployment.environment.home) == ("/home/u/crossfed-work", "/home/u/crossfed")
    assert (far.dataset, near.name) == ("/home/u/crossfed/data/far", "near")
    refused = [line.strip() for line in said if line.startswith("  ")]
    for line, expected in zip(
        refused,
        ["far: expected NAME=", "expected a port", "far is there already", "no.txt does not exist there"]
        + ["data/x is a prepared dataset there, expected its absolute path"]
        + ["home is 'crossfed', expected an absolute path", "workdir is '~/work', expected", "none does not"],
        strict=True,
    ):
        assert expected in line
    (tmp_path / "new").mkdir()
    for name, text in {"far.home": "crossfed", "far.workdir": "work"}.items():
        dialog, _ = asked(["text.txt", "", ""], **{name: text})
        with pytest.raises(InputError, match=rf"--answer {name}={text}: .* an absolute path at the facility"):
            begin(made(tmp_path / "new", facilities={"far": "far.example.org"}, data={}), dialog)


def test_a_login_and_a_model_that_fail_are_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each ended the command. The logins are real: nothing listens at the second, the first has no address."""
    (tmp_path / "empty").mkdir()
    model = tmp_path / "fed" / "model"

    def make(request: Request, source: str) -> Path:
        if source == "ORG/UNKNOWN":
            raise TransientError("ORG/UNKNOWN could not be loaded: the hub does not answer")
        return model if source == "demo" else convert(request, source)

    convert = beginning._model
    monkeypatch.setattr(beginning, "_model", make)
    lines = ["far=u@no.host.invalid", "far=127.0.0.1:1", "near=local", "", str(tmp_path / "text")]
    lines += [str(tmp_path / "empty"), "./none", "no name", "ORG/UNKNOWN", "demo"]
    dialog, said = asked(lines)
    begin(made(tmp_path, facilities={}, data={}, model=""), dialog)
    refused = [line.strip() for line in said if line.startswith("  ")]
    expected = ["far: the name no.host.invalid", "far: nothing listens at 127.0.0.1:1"]
    expected += ["holds no config.json", "./none does not exist", "is neither a folder here nor", "hub does not answer"]
    for line, words in zip(refused, expected, strict=True):
        assert words in line
    assert all(line.endswith("then answer again") for line in refused[:2])
    for wrong in ({"model": "ORG/UNKNOWN"}, {"model": str(tmp_path / "empty")}):
        dialog, _ = asked([], **wrong)
        with pytest.raises(TransientError if "ORG" in wrong["model"] else InputError):
            begin(dataclasses.replace(made(tmp_path, model=""), folder=tmp_path / "new"), dialog)


def test_all_that_fails_of_what_the_command_says_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The second login was tried once the first was corrected; a folder without a model was found after both."""
    far = made(tmp_path, facilities={"far": "127.0.0.1:1", "too": "no.host.invalid"}, data={})
    with pytest.raises(TransientError, match="too: the name no.host.invalid does not resolve"):
        begin(far, Dialog(given={}, yes=True))
    assert [record.message.partition(";")[0] for record in caplog.records] == ["far: nothing listens at 127.0.0.1:1"]
    with pytest.raises(InputError, match="does not exist; expected a checkpoint"):
        begin(dataclasses.replace(far, model="./none"), Dialog(given={}, yes=True))


@pytest.mark.parametrize("code", [1, 0])
def test_what_its_check_finds_stands_in_the_way_of_a_run_until_one_finds_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run began in spite of it; where `crossfed check` had failed before, no run began though this one passed."""
    row = ok("here", "dataset", "1 block") if code == 0 else fail("here", "dataset", "there is none", "make one")
    monkeypatch.setattr(beginning, "_model", lambda *_: tmp_path / "fed" / "model")
    begin(made(tmp_path), Dialog(given={}, yes=True))
    file = tmp_path / "fed" / "workflow" / "federation.yml"
    federation = read_federation(file)
    before = [fail("here", "dataset", "there is none", "make one")] if code == 0 else []
    remember_failures(federation, sha256_of(file), before)
    monkeypatch.setattr(check, "_check", lambda *_, **__: [row])
    with pytest.raises(typer.Exit) as stop:
        quickstart(tmp_path / "fed", yes=True, set_up=False)
    assert stop.value.exit_code == code
    assert bool(still_failing(federation, file)) == bool(code)


def test_what_a_check_finds_is_said_of_the_file_that_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Facilities may take minutes to answer, in which the file is corrected: no run of the corrected one began."""
    file = write_federation(tmp_path, ["a"])
    checked = file.read_bytes()

    def corrected(*_: object, **__: object) -> list[Row]:
        file.write_bytes(checked + b"# corrected\n")
        return [fail("a", "dataset", "there is none", "make one")]

    monkeypatch.setattr(check, "_check", corrected)
    check.check_for_run(file, link=False)
    assert not still_failing(read_federation(file), file)
    file.write_bytes(checked)
    assert "there is none" in still_failing(read_federation(file), file)


@pytest.mark.parametrize("before", ["", "a ssh-ed25519 AAAA\n", "a ssh-ed25519 AAAA"])
def test_a_host_key_is_a_line_of_its_own(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_keys, "scan", lambda _: ["b ssh-ed25519 BBBB"])
    monkeypatch.setattr(host_keys, "fingerprint_of", lambda _: FINGERPRINT)
    known = tmp_path / "known_hosts"
    known.write_text(before)
    login = Deployment(type="ssh", host="b", workdir="/w", known_hosts=str(known))
    with pytest.raises(InputError, match=f"--answer far.host-key=yes: b shows {FINGERPRINT}, not 'yes': ask the site"):
        host_keys.trust(Dialog(given={"far.host-key": "yes"}, yes=True), "far", login)
    dialog, said = asked(["yes", FINGERPRINT])
    assert host_keys.trust(dialog, "far", login) and f"  b shows {FINGERPRINT}, not 'yes': ask the site" in said
    assert known.read_text().splitlines() == [*before.splitlines(), "b ssh-ed25519 BBBB"]

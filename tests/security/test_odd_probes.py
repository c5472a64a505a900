"""What a facility's probe or gate answers to `crossfed check`: whatever it is, it is told in words of this facility."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.base_model import check_same_base
from coordinator.preflight.check import check_alike, check_facility
from coordinator.preflight.facility import BEGIN
from coordinator.preflight.gate_answer import summary_or_none
from coordinator.preflight.probe_answer import BaseModelAnswer, DatasetAnswer, ProbeAnswer, read_probe_answer
from coordinator.preflight.remote import Answer, answer_of
from coordinator.preflight.versions import FORMATS
from facility import __version__
from facility.exchange.errors import ConfigurationError
from facility.exchange.hints import keys_of
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.signatures import _run
from facility.exchange.messages.strict_json import is_printable
from facility.gating.queue import run_program
from tests.federations import write_federation

DATASET: dict[str, Any] = {
    "task": "language",
    "block_tokens": 32,
    "vocabulary_size": 300,
    "tokenizer_sha256": "a" * 64,
    "chat_template_sha256": "",
    "blocks": {"train": 100, "validation": 20},
    "documents": {"train": 90, "validation": 10},
    "classes": 0,
}
DISK = {"exists": True, "writable": True, "free": 10**12}
QUOTA = {"of": "home", "free": 10**12, "files_free": None}
HONEST: dict[str, Any] = {
    "crossfed": __version__,
    "python": "3.12.1",
    "packages": {"torch": "2.9.0", "transformers": "4.57.0", "safetensors": "0.6.2"},
    "optional": {"bitsandbytes": None},
    "formats": FORMATS,
    "settings_keys": list(keys_of(FacilitySettings)),
    "dataset": DATASET,
    "disk": DISK | {"quotas": [QUOTA]},
    "base_model": {"bytes": 10, "sha256": "b" * 64},
    "trainer": "",
}
ODD = [
    None,
    True,
    -1,
    0,
    10**18,
    10**30,
    1.5,
    1e300,
    "",
    "x" * 5000,
    "\x1b[2Jok",
    "[/]",
    "\u202eevil",
    "\ud800",
    [],
    {},
]
ODD += [[1], {"a": 1}, [[[[]]]], {"error": []}, {"error": {"a": 1}}, {"train": "many"}, {"sha256": ["c"]}]
TEXTS = [one for one in ODD if isinstance(one, str) and one != "\ud800"]
LINES = ["", "no JSON", "[]", "3", '"text"', "[" * 100_000, '{"a": 1e400}', '{"a": NaN}', "{" + '"a":{' * 5000]
LINES += ['{"crossfed": "1", "crossfed": "2"}', "9" * 5000, "\x00", json.dumps(HONEST)[:-1]]


def changed(seed: int) -> str:
    """The honest answer with one to three of its values replaced or left out."""
    chosen = random.Random(seed)
    answer = copy.deepcopy(HONEST)
    for _ in range(chosen.randint(1, 3)):
        inside: Any = answer
        while True:
            key = chosen.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
            if isinstance(inside[key], dict | list) and inside[key] and chosen.random() < 0.7:
                inside = inside[key]
                continue
            if isinstance(inside, dict) and chosen.random() < 0.2:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(chosen.choice(ODD))
            break
        if not answer:
            break
    return json.dumps(answer)


@pytest.fixture
def federation(tmp_path: Path):
    training = {"lora": {"rank": 2, "base": "base"}}
    return read_federation(write_federation(tmp_path, ["far", "near"], training=training))


def rows_of(federation: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], ProbeAnswer | None]:
    said = Answer(code=0, out=f"a greeting\n{BEGIN}\n{line}\n", error="")
    monkeypatch.setattr("coordinator.preflight.facility.run_there", lambda *_, **__: said)
    rows, answer = check_facility(federation, federation.facilities[0], None, link=False)
    return rows, answer


def assert_told(rows: list[Any], answers: dict[str, ProbeAnswer | None]) -> None:
    """Every row is a line of printable text, and what is compared between facilities takes these answers."""
    there = {name: one for name, one in answers.items() if one is not None}
    rows = [*rows, *check_alike({name: one.dataset for name, one in there.items()})]
    rows += check_same_base({name: one.base_model for name, one in there.items()})
    for row in rows:
        assert is_printable(row.found) and len(row.found) < 2000, row


def test_an_honest_answer_is_read(federation: Any, monkeypatch: pytest.MonkeyPatch):
    rows, answer = rows_of(federation, json.dumps(HONEST), monkeypatch)
    assert answer is not None and answer.dataset.blocks == {"train": 100, "validation": 20}
    assert {row.check for row in rows} >= {"message format", "packages", "dataset", "base model", "room"}
    assert not [row for row in rows if row.verdict == "fail"], rows


@pytest.mark.parametrize(
    ("known", "verdict", "said"),
    [
        (lambda keys: [*keys, "training.of_a_newer_one"], "ok", "on both sides"),
        (lambda keys: [key for key in keys if key != "training.unsent_share"], "fail", ": training.unsent_share"),
        (lambda keys: [], "fail", "its jobs would refuse their settings: "),
        (None, "warning", "its jobs may not know all settings"),
    ],
    ids=["newer", "older by a key", "nothing", "older than the question"],
)
def test_an_older_crossfed_of_the_same_version_number_is_told_before_its_jobs_refuse_their_settings(
    federation: Any, monkeypatch: pytest.MonkeyPatch, known: Any, verdict: str, said: str
):
    answer = HONEST | ({"settings_keys": known(HONEST["settings_keys"])} if known else {})
    if known is None:
        answer.pop("settings_keys")
    rows, _ = rows_of(federation, json.dumps(answer), monkeypatch)
    (row,) = [one for one in rows if one.check == "message format"]
    assert row.verdict == verdict and said in row.found, row
    assert verdict == "ok" or "crossfed setup" in row.fix


def test_no_odd_answer_ends_the_check_or_shows_more_than_text(federation: Any, monkeypatch: pytest.MonkeyPatch):
    refused, honest = 0, read_probe_answer(json.dumps(HONEST))
    for line in [*LINES, *map(changed, range(200))]:
        rows, answer = rows_of(federation, line, monkeypatch)
        assert rows and {row.subject for row in rows} == {"far"}
        refused += answer is None
        assert_told(rows, {"far": answer, "near": honest, "third": honest})
    assert 100 < refused < len(LINES) + 200, "most are refused, some are harmless"


GATE: dict[str, Any] = {"gate": 1, "facility": "far", "federations": ["two"], "nodes": 1, "hours": 2.0}


@pytest.mark.parametrize(
    ("key", "sound"),
    [
        ("gate", (0, 10**18)),
        ("nodes", (0, 10**18)),
        ("minimum_sum", (0, 10**18, None)),
        ("hours", (0, 1.5)),
        ("ahead_seconds", (0, 1.5)),
        ("masks", (True,)),
        ("facility", TEXTS),
        ("workdir", TEXTS),
        ("federations", [one for one in ODD if isinstance(one, list)]),
    ],
)
def test_an_odd_gate_is_no_gate(key: str, sound: Sequence[Any]):
    """Numbers that are none, or too large for a float, ended the check of everybody."""
    assert summary_or_none(json.dumps(GATE)) is not None
    for value in ODD:
        fits = any(type(value) is type(one) and value == one for one in sound)
        assert (summary_or_none(json.dumps(GATE | {key: value})) is not None) == fits, value
    for line in LINES:
        assert summary_or_none(line) is None


def test_an_answer_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    """By its size, long before its time; nothing of it is kept."""
    answer = answer_of(["sh", "-c", "yes crossfed"], data=b"", seconds=10_000)
    assert answer.code == 125 and answer.out == "" and "MiB for an answer" in answer.error


def test_commands_answer_as_before(tmp_path: Path):
    """Code, both outputs, an input that is not read, and a time that is over though a child holds the output open."""
    assert answer_of(["sh", "-c", "cat; echo oh >&2; exit 3"], data=b"in", seconds=200) == Answer(
        code=3, out="in", error="oh\n"
    )
    assert answer_of(["true"], data=bytes(1 << 20), seconds=200).code == 0
    assert answer_of(["crossfed-no-such-program"], data=b"", seconds=200).code == 127
    child = f"(sleep 60; touch '{tmp_path}/over') & exit 0"
    assert answer_of(["sh", "-c", child], data=b"", seconds=1).code == 124
    assert not (tmp_path / "over").exists()


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        ("aab", {"c": "most have A"}),
        ("aa", {}),
        ("ab", {"a": "others have B", "b": "others have A"}),
        ("aabb", {"a": "others have B", "b": "others have B", "c": "others have A", "d": "others have A"}),
        ("abc", {"a": "others have B, C", "b": "others have A, C", "c": "others have A, B"}),
    ],
)
def test_nobody_is_called_odd_without_a_majority(digests: str, told: dict[str, str]):
    """Of two facilities with different base models the second was told that most have the first one's."""
    answers = {name: BaseModelAnswer(sha256=letter * 64) for name, letter in zip("abcd", digests, strict=False)}
    rows = {row.subject: row.found for row in check_same_base(answers)}
    assert rows.keys() == told.keys()
    for name, words in told.items():
        for letter in "ABC":
            words = words.replace(letter, letter.lower() * 64)
        assert words in rows[name]
    values = {name: DatasetAnswer(image_size=letter) for name, letter in zip("abcd", digests, strict=False)}
    assert {row.subject for row in check_alike(values)} == set(told)


def test_a_program_that_is_not_there_is_told_whatever_folders_of_path_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after `su`, which keeps a PATH: the kernel says "not permitted", not that there is no such program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("no-such-program", "ssh-keygen"):
        (tmp_path / name).touch(mode=0o600)
    answer = answer_of(["no-such-program"], data=b"", seconds=200)
    assert answer.code == 127 and "there is no no-such-program command on this machine" in answer.error
    code, said = run_program(["no-such-program"])
    assert code == 127 and said.startswith("there is no no-such-program command")
    with pytest.raises(ConfigurationError, match="ssh-keygen is not on the PATH"):
        _run(["-Y", "sign"], b"", "signing")

"""Laws of the chained log: what was written verifies, and any change of it is found at its line."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import typer

from coordinator.archive.audit import heads_of
from coordinator.commands.watch import audit
from facility.exchange.errors import InputError
from facility.exchange.files import audit_log
from facility.exchange.files.audit_log import append, head, verify


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for number in range(6):
        append(path, "event", value=number)
    return path


def test_what_was_written_verifies_and_is_private(log: Path):
    found = verify(log)
    assert (found.lines, found.broken, found.head) == (6, 0, head(log))
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("line", range(6))
@pytest.mark.parametrize("attack", ["alter", "remove", "insert", "swap"])
def test_every_change_is_found_at_its_line(log: Path, line: int, attack: str):
    heads = [audit_log.digest_of(one) for one in log.read_bytes().splitlines()]
    lines = log.read_bytes().splitlines(keepends=True)
    if attack == "alter":
        lines[line] = lines[line].replace(b'"value": ', b'"value": 1')
    elif attack == "remove":
        del lines[line]
    elif attack == "insert":
        lines.insert(line, lines[line])
    else:
        other = (line + 1) % 6
        lines[line], lines[other] = lines[other], lines[line]
        line = min(line, other)
    log.write_bytes(b"".join(lines))
    found = verify(log, heads)
    # A line's own change shows in the next one's digest, of the last line in the heads that were seen.
    expected = {"alter": {line + 2}, "remove": {line + 1}, "insert": {line + 1, line + 2}, "swap": {line + 1}}[attack]
    assert found.broken in expected, found


def test_a_log_that_was_cut_short_lacks_a_head_that_was_seen(log: Path):
    seen = head(log)
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(log).broken == 0, "the chain alone cannot tell"
    found = verify(log, [seen])
    assert found.broken == 4 and seen in found.reason


def test_a_line_torn_by_a_power_cut_is_told_and_the_chain_goes_on(log: Path):
    log.write_bytes(log.read_bytes()[:-20])
    assert verify(log).broken == 6, "nothing says yet that it was torn"
    append(log, "event", value=7)
    whats = [json.loads(line)["what"] for line in log.read_bytes().splitlines() if line.endswith(b"}")]
    assert whats[-2:] == ["torn", "event"] and verify(log).broken == 0
    lines = log.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b"time", b"tame")
    log.write_bytes(b"".join(lines))
    assert verify(log).broken == 6, "the torn line is bound by the one that tells of it"


def _many(path: Path, name: int) -> None:
    for number in range(25):
        append(path, "event", of=name, value=number)


def test_processes_that_write_at_once_make_one_chain(tmp_path: Path):
    path = tmp_path / "log"
    writers = [multiprocessing.get_context("fork").Process(target=_many, args=(path, name)) for name in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (verify(path).lines, verify(path).broken) == (100, 0)


def test_text_from_another_machine_stays_within_its_line(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "event", reason='x\n{"number": 1, "previous": "0"}\n\udcff' + "y" * 100_000)
    append(path, "event", reason="z")
    assert (verify(path).lines, verify(path).broken) == (2, 0)


def test_heads_in_the_coordinators_log_uncover_a_facilitys_cut_log(log: Path, tmp_path: Path):
    archive = tmp_path / "archive"
    archive.mkdir()
    append(archive / "audit.jsonl", "received", facility="a", facility_head=head(log))
    append(archive / "audit.jsonl", "received", facility="b", facility_head="0" * 64)
    assert heads_of(archive, "a") == [head(log)]
    (archive / "audit.jsonl").write_bytes((archive / "audit.jsonl").read_bytes().replace(b'"a"', b'"c"'))
    with pytest.raises(InputError, match="line 2 is broken"):
        heads_of(archive, "a")


def test_a_log_without_a_line_is_broken(log: Path):
    log.write_bytes(b"")
    assert verify(log).broken == 1 and "removed" in verify(log).sentence(log)


def test_a_line_that_was_cut_off_in_the_coordinators_log_hides_no_head(tmp_path: Path):
    for number in range(3):
        append(tmp_path / "audit.jsonl", "received", facility="a", facility_head=f"{number:064x}")
        if number == 1:
            (tmp_path / "audit.jsonl").write_bytes((tmp_path / "audit.jsonl").read_bytes()[:-20])
    assert heads_of(tmp_path, "a") == [f"{0:064x}", f"{2:064x}"]


def test_a_comparison_with_nothing_is_none(log: Path, tmp_path: Path):
    archive = tmp_path / "archive"
    archive.mkdir()
    append(archive / "audit.jsonl", "received", facility="alpha", facility_head=head(log).upper())
    for folder, name in ((archive, "alhpa"), (archive, ""), (None, "alpha")):
        with pytest.raises(InputError, match="alpha, none of 'alhpa'|go together"):
            audit("verify", log, None, folder, name)
    with pytest.raises(typer.Exit) as end:
        audit("verify", log, None, archive, "alpha")
    assert end.value.exit_code == 0

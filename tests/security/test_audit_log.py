"""Laws of the chained log: what was written verifies, and any change of it is found at its line."""

from __future__ import annotations

import json
import multiprocessing
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from coordinator.archive.audit import heads_of
from coordinator.commands.watch import audit
from facility.exchange.errors import InputError
from facility.exchange.files import audit_log
from facility.exchange.files.audit_log import append, head_digest, verify_log
from facility.exchange.messages.audit_compare import checked, compare_logs, head_of, verify_heads


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "audit.jsonl"
    for number in range(6):
        append(path, "event", value=number)
    return path


def test_what_was_written_verifies_and_is_private(log: Path):
    found = verify_log(log)
    assert (found.lines, found.broken, found.head) == (6, 0, head_digest(log))
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
    found = verify_log(log, heads)
    # A line's own change shows in the next one's digest, of the last line in the heads that were seen.
    expected = {"alter": {line + 2}, "remove": {line + 1}, "insert": {line + 1, line + 2}, "swap": {line + 1}}[attack]
    assert found.broken in expected, found


def test_a_log_that_was_cut_short_lacks_a_head_that_was_seen(log: Path):
    seen = head_digest(log)
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    assert verify_log(log).broken == 0, "the chain alone cannot tell"
    found = verify_log(log, [seen])
    assert found.broken == 4 and seen in found.reason


def test_a_line_torn_by_a_power_cut_is_told_and_the_chain_goes_on(log: Path):
    log.write_bytes(log.read_bytes()[:-20])
    assert verify_log(log).broken == 6, "nothing says yet that it was torn"
    append(log, "event", value=7)
    whats = [json.loads(line)["what"] for line in log.read_bytes().splitlines() if line.endswith(b"}")]
    assert whats[-2:] == ["torn", "event"] and verify_log(log).broken == 0
    lines = log.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b"time", b"tame")
    log.write_bytes(b"".join(lines))
    assert verify_log(log).broken == 6, "the torn line is bound by the one that tells of it"


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
    assert (verify_log(path).lines, verify_log(path).broken) == (100, 0)


def test_text_from_another_machine_stays_within_its_line(tmp_path: Path):
    path = tmp_path / "log"
    append(path, "event", reason='x\n{"number": 1, "previous": "0"}\n\udcff' + "y" * 100_000)
    append(path, "event", reason="z")
    assert (verify_log(path).lines, verify_log(path).broken) == (2, 0)


def test_heads_in_the_coordinators_log_uncover_a_facilitys_cut_log(log: Path, tmp_path: Path):
    archive = tmp_path / "archive"
    archive.mkdir()
    append(archive / "audit.jsonl", "received", facility="a", facility_head=head_digest(log))
    append(archive / "audit.jsonl", "received", facility="b", facility_head="0" * 64)
    assert heads_of(archive, "a") == [head_digest(log)]
    (archive / "audit.jsonl").write_bytes((archive / "audit.jsonl").read_bytes().replace(b'"a"', b'"c"'))
    with pytest.raises(InputError, match="line 2 is broken"):
        heads_of(archive, "a")


def test_a_log_without_a_line_is_broken(log: Path):
    log.write_bytes(b"")
    assert verify_log(log).broken == 1 and "removed" in verify_log(log).sentence(log)


def test_a_line_that_was_cut_off_in_the_coordinators_log_hides_no_head(tmp_path: Path):
    for number in range(3):
        append(tmp_path / "audit.jsonl", "received", facility="a", facility_head=f"{number:064x}")
        if number == 1:
            (tmp_path / "audit.jsonl").write_bytes((tmp_path / "audit.jsonl").read_bytes()[:-20])
    assert heads_of(tmp_path, "a") == [f"{0:064x}", f"{2:064x}"]


def test_a_comparison_with_nothing_is_none(log: Path, tmp_path: Path):
    archive = tmp_path / "archive"
    archive.mkdir()
    append(archive / "audit.jsonl", "received", facility="alpha", facility_head=head_digest(log).upper())
    for folder, name in ((archive, "alhpa"), (archive, ""), (None, "alpha")):
        with pytest.raises(InputError, match="alpha, none of 'alhpa'|go together"):
            audit("verify", log, None, folder, name)
    with pytest.raises(typer.Exit) as end:
        audit("verify", log, None, archive, "alpha")
    assert end.value.exit_code == 0


def copied(log: Path, name: str, lines: int, *more: str) -> Path:
    """The log's first lines, and lines of its owner's making after them."""
    path = log.with_name(name)
    path.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:lines]))
    for what in more:
        append(path, what)
    return path


def compare(file: Path, *others: object) -> tuple[int, str]:
    """Exit code and output of both commands, which say the same."""
    words = ["compare", str(file), *map(str, others)]
    results = [
        subprocess.run([sys.executable, "-m", *command, *words], capture_output=True, text=True)
        for command in (["facility.audit"], ["coordinator.cli", "audit"])
    ]
    assert len({(one.returncode, one.stdout, one.stderr) for one in results}) == 1, results
    return results[0].returncode, results[0].stdout


def test_two_facilities_that_exchange_heads_find_out_that_they_were_shown_two_logs(log: Path):
    mine, early = copied(log, "mine", 5), copied(log, "early", 3)
    forked = copied(log, "forked", 3, "ordered\x1b[2J", "ordered")
    heads = {path: head_of(path) for path in (log, mine, early, forked)}
    assert heads[early] == f"3:{head_digest(early)}"
    for path in (mine, early):
        assert compare_logs(log, [heads[path], str(path), head_digest(path).upper()])[1] == 0
        assert compare_logs(path, [str(log)])[1] == 0, "the shorter is the beginning of the longer"
    text, code = compare_logs(log, [heads[forked]])
    assert code == 1 and "TWO LOGS, which part at this line or before" in text
    code, text = compare(log, heads[mine], forked)
    assert code == 1 and "is line 5 of the 6" in text and "TWO LOGS: the first 3 lines" in text
    assert "line 4 is ordered" in text and "event of 2" in text and "\x1b" not in text


def test_a_head_is_found_at_its_line_the_last_one_too_however_it_is_written(log: Path):
    for lines in range(1, 7):
        own = head_of(copied(log, str(lines), lines))
        for one in (own, own.upper(), own.partition(":")[2]):
            assert compare_logs(log, [one]) == (f"{one}: is line {lines} of the 6 of {log}", 0)
            assert verify_heads(log, [one])[1] == 0


def test_a_log_whose_first_line_is_broken_has_no_exit_code_of_a_sound_one(log: Path):
    log.write_bytes(b"")
    text, code = verify_heads(log, [])
    assert code == 1 and "line 1 is broken" in text


def test_a_head_that_nothing_can_be_said_of_yet_is_not_taken_for_the_same_log(log: Path):
    early = copied(log, "early", 3)
    for other, reason in (
        (head_of(log), f"too few for a verdict; compare {head_of(early)} with the longer log"),
        (head_digest(log), "no line of"),
    ):
        text, code = compare_logs(early, [other])
        assert code == 1 and reason in text


def test_heads_that_came_with_a_facilitys_orders_are_lines_of_the_copy_that_it_was_shown(log: Path, tmp_path: Path):
    gate = tmp_path / "gate.jsonl"
    for number, seen in enumerate([head_digest(copied(log, "early", 2)), head_digest(log)]):
        append(gate, "approved", federation="heron", round=number, coordinators_head=seen)
    code, text = compare(log, gate)
    assert code == 0 and "all 2 heads" in text
    text, code = compare_logs(copied(log, "forked", 4, "ordered", "ordered"), [str(gate)])
    assert code == 1 and "the order of heron, round 1 came with the head" in text


def test_what_is_no_head_and_no_log_is_told(log: Path, tmp_path: Path):
    broken = copied(log, "broken", 6)
    broken.write_bytes(broken.read_bytes().replace(b'"value": 2', b'"value": 3'))
    for others, reason in (
        ([], "nothing to compare with"),
        (["7:abc"], "cannot be read"),
        ([str(broken)], "line 4 is broken"),
        ([str(tmp_path)], "cannot be read"),
    ):
        with pytest.raises(InputError, match=reason):
            compare_logs(log, others)
    assert checked(log, [head_of(log)]).broken == 0
    with pytest.raises(InputError, match="is no head, expected LINES:SHA256"):
        checked(log, ["latest"])


def test_a_copy_that_a_shell_pipes_in_is_compared_as_a_file_is(log: Path):
    """`audit compare FILE <(ssh ...)`: a pipe is read once, and a log that is the same is not taken for another."""
    command = [sys.executable, "-m", "facility.audit", "compare"]
    for words in (f"{log} <(cat {log})", f"<(cat {log}) {log}"):
        done = subprocess.run(["bash", "-c", f"{shlex.join(command)} {words}"], capture_output=True, text=True)
        assert done.returncode == 0 and "one log with" in done.stdout, done.stdout + done.stderr

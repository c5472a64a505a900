"""`crossfed setup`: the code arrives whole, setup.sh runs with what federation.yml says, names and paths stay words."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.row import fail, ok
from coordinator.remote_setup import set_up
from coordinator.share import share_tokenizer
from facility.exchange.errors import InputError, TransientError
from tests.rounds.test_setup import make_tokenizer

FEDERATION = """\
name: two
model: model
rounds: 1
facilities:
  - name: here
    dataset: data
  - name: far
    dataset: ~/data
    deployment:
      type: slurm
      host: login.example.org
      workdir: /scratch/crossfed
      template: slurm
      fill: {account: proj42, partition: gpu}
      environment: {home: "~/it's a home"}
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home of the account at the facility; `ssh` runs its command here, as sshd would: by the account's shell."""
    home, programs = tmp_path / "far", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()
    (programs / "ssh").write_text(f"#!/bin/bash\ncd '{home}' && HOME='{home}' exec bash -c \"${{@: -1}}\"\n")
    (programs / "ssh").chmod(0o755)
    (home / ".bash_profile").write_text(f"export PATH='{Path(sys.executable).parent}':$PATH\n")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow" / "federation.yml").write_text(FEDERATION)
    return home


@pytest.mark.slow
def test_a_facility_is_set_up_over_ssh_and_again(far: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    for _ in range(2):
        set_up(federation, "far", bundle=None, arguments=["--as-is", "--no-self-check"])
    home = far / "it's a home"
    assert "env.sh: unchanged" in capfd.readouterr().out and (home / "env.sh").is_file()
    assert (home / "code" / "crossfed" / "facility" / "round.py").is_file()
    assert "<account>" in (home / "code" / "job.sh").read_text()
    assert not (home / "code.old").exists() and not (home / "code.new").exists()


def test_code_that_a_broken_swap_put_aside_stays_until_the_new_code_has_come(far: Path, tmp_path: Path, monkeypatch):
    home = far / "it's a home"
    (home / "code.old").mkdir(parents=True)
    (home / "code.old" / "kept").touch()
    (tmp_path / "bin" / "tar").write_text('#!/bin/bash\n[ "$1" = xf ] && exit 2\nexec /bin/tar "$@"\n')  # a full disk
    (tmp_path / "bin" / "tar").chmod(0o755)
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with pytest.raises(TransientError):
        set_up(federation, "far", bundle=None, arguments=[])
    assert (home / "code" / "kept").is_file()


def twice_at_once(folder: Path, send: Callable[[], object]) -> list[str]:
    """What two sends end with ('': well): the second has unpacked all before the first does, and goes on after it."""
    first, begun, unpacked, go_first, go_second = (folder / name for name in ("first", "a", "b", "c", "d"))
    for fifo in (begun, unpacked, go_first, go_second):
        os.mkfifo(fifo)
    (folder / "bin" / "tar").write_text(
        '#!/bin/bash\n[ "$1" = xf ] || exec /bin/tar "$@"\n'
        f"if mkdir '{first}' 2>/dev/null; then echo >'{begun}'; read -r <'{go_first}'; exec /bin/tar \"$@\"; fi\n"
        f"/bin/tar \"$@\"; code=$?; echo >'{unpacked}'; read -r <'{go_second}'; exit $code\n"
    )
    (folder / "bin" / "tar").chmod(0o755)

    def ended() -> str:
        try:
            send()
        except TransientError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        results = [pool.submit(ended)]
        begun.read_text()
        results.append(pool.submit(ended))
        unpacked.read_text()
        go_first.write_text("go\n")
        results[0].result()
        go_second.write_text("go\n")
        return [one.result() for one in results]


def test_two_set_ups_at_once_leave_the_code_of_one_of_them_whole(far: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("coordinator.remote_setup.setup_command", lambda *_, **__: "exit 0")
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    ends = twice_at_once(tmp_path, lambda: set_up(federation, "far", bundle=None, arguments=[]))
    home = far / "it's a home"
    assert (home / "code" / "crossfed" / "facility" / "setup.sh").is_file()
    assert "another `crossfed setup` sends its code to ~/it's a home/code at login.example.org" in ends[0]
    assert ends[1] == "" and sorted(path.name for path in home.iterdir()) == [".setup.lock", "code"]


def test_code_is_not_replaced_while_setup_sh_works_with_it(far: Path, tmp_path: Path):
    home = far / "it's a home"
    (home / "code").mkdir(parents=True)
    (home / "code" / "kept").touch()
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with open(home / ".setup.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            TransientError, match="another set-up works in ~/it's a home at login.example.org; wait for it"
        ):
            set_up(federation, "far", bundle=None, arguments=[])
    assert (home / "code" / "kept").exists() and not list(home.glob("code.*"))


def test_a_full_disk_is_told_in_a_few_lines(far: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """tar complains of each file."""
    floods = "cat >/dev/null; for i in {1..1000}; do echo tar: file $i: Cannot write: No space left; done >&2; exit 2"
    (tmp_path / "bin" / "tar").write_text(f'#!/bin/bash\n[ "$1" = xf ] || exec /bin/tar "$@"\n{floods}\n')
    (tmp_path / "bin" / "tar").chmod(0o755)
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with pytest.raises(TransientError, match="could not keep the code in .* .code 2.; the lines above say why"):
        set_up(federation, "far", bundle=None, arguments=[])
    assert 0 < capfd.readouterr().out.count("No space left") <= 20


def test_two_shares_at_once_both_send_the_whole_tokenizer(far: Path, tmp_path: Path):
    (tmp_path / "text").write_text("a small text\n")
    make_tokenizer(tmp_path / "workflow" / "model", tmp_path / "text")
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    ends = twice_at_once(tmp_path, lambda: list(share_tokenizer(federation, weights=False, only=["far"])))
    assert ends == ["", ""]
    shared = far / "it's a home" / "shared"
    assert [path.name for path in shared.iterdir()] == ["model"] and (shared / "model" / "tokenizer.json").is_file()


def test_what_cannot_be_set_up_is_refused(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with pytest.raises(InputError, match="is on this machine"):
        set_up(federation, "here", bundle=None, arguments=[])
    with pytest.raises(InputError, match="no facility 'fra' in .*expected one of here, far"):
        set_up(federation, "fra", bundle=None, arguments=[])
    with monkeypatch.context() as asked, pytest.raises(InputError, match="holds no bundle.json"):
        asked.setattr("coordinator.remote_setup.check_connection", None)  # no login before that
        set_up(federation, "far", bundle=tmp_path, arguments=[])
    for wrong in (["--python", "no-such-python"], ["--no-such-option"], ["--torch", "tpu"]):
        with pytest.raises(InputError, match="ended with code 2; its last lines above say why, and what to change"):
            set_up(federation, "far", bundle=None, arguments=wrong)


@pytest.mark.parametrize(
    ("code", "error"), [(2, InputError), (75, TransientError), (255, TransientError), (137, TransientError)]
)
def test_only_what_may_go_away_by_itself_is_to_be_tried_again(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
):
    monkeypatch.setattr("coordinator.remote_setup._send", lambda *_: None)
    monkeypatch.setattr("coordinator.remote_setup.setup_command", lambda *_, **__: f"exit {code}")
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with pytest.raises(error, match=f"ended with code {code}"):
        set_up(federation, "far", bundle=None, arguments=[])


@pytest.mark.parametrize(
    ("check", "error"),
    [("connection", TransientError), ("key", InputError), ("host key", InputError), ("login", TransientError)],
)
def test_a_login_that_stays_refused_is_no_transient_error(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, error: type[Exception]
):
    monkeypatch.setattr("coordinator.remote_setup.check_connection", lambda *_: fail("far", check, "no", "mend it"))
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    with pytest.raises(error, match="far: no; mend it"):
        set_up(federation, "far", bundle=None, arguments=[])


@pytest.mark.parametrize(
    ("program", "does", "words"),
    [
        ("ssh", 'cat >/dev/null; case "${@: -1}" in *tar*) exit 255 ;; esac', "the connection to .* broke"),
        ("tar", 'case $1 in xf) cat >/dev/null; exit 2 ;; *) exec /bin/tar "$@" ;; esac', "could not keep the code in"),
        ("tar", '/bin/tar "$@"; case $1 in cf) exit 2 ;; esac', "tar could not pack the code on this machine"),
    ],
)
def test_who_failed_is_named_as_the_code_is_sent_and_the_old_code_stays(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, does: str, words: str
):
    monkeypatch.setattr("coordinator.remote_setup.check_connection", lambda *_: ok("far", "connection", "answers"))
    kept = far / "it's a home" / "code" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "bin" / program).write_text(f"#!/bin/bash\n{does}\n")
    (tmp_path / "bin" / program).chmod(0o755)
    with pytest.raises(TransientError, match=words):
        set_up(read_federation(tmp_path / "workflow" / "federation.yml"), "far", bundle=None, arguments=[])
    assert kept.exists()


def test_a_tokenizer_in_a_hubs_cache_is_shared(far: Path, tmp_path: Path):
    """Its files are symbolic links, which would lead nowhere at a facility."""
    model, blobs = tmp_path / "workflow" / "model", tmp_path / "blobs"
    (tmp_path / "text").write_text("a small text\n")
    make_tokenizer(blobs, tmp_path / "text")
    model.mkdir()
    for blob in blobs.iterdir():
        (model / blob.name).symlink_to(blob)
    federation = read_federation(tmp_path / "workflow" / "federation.yml")
    for sent in (True, False):
        (found,) = share_tokenizer(federation, weights=False, only=["far"])
        assert found.sent == sent
    there = far / "it's a home" / "shared" / "model"
    assert (there / "tokenizer.json").is_file() and not (there / "tokenizer.json").is_symlink()


def test_a_tokenizer_goes_to_no_facility_that_is_unknown_or_gives_no_shell(far: Path, tmp_path: Path, caplog):
    (tmp_path / "text").write_text("a small text\n")
    make_tokenizer(tmp_path / "workflow" / "model", tmp_path / "text")
    file = tmp_path / "workflow" / "federation.yml"
    with pytest.raises(InputError, match="--facility names 'fra'; the facilities are here, far"):
        next(share_tokenizer(read_federation(file), weights=False, only=["here", "fra"]))
    head, _, _ = FEDERATION.partition("  - name: far")
    access = (
        "{url: https://example.org, system: s, token_url: https://example.org/t, client_id: i, client_secret_file: f}"
    )
    file.write_text(
        f"{head}  - name: far\n    dataset: ~/data\n    deployment:\n      type: firecrest\n      workdir: /scratch\n"
        f"      template: slurm\n      fill: {{account: a, partition: p, home: /home/x}}\n      firecrest: {access}\n"
    )
    assert [one.facility for one in share_tokenizer(read_federation(file), weights=False)] == ["here"]
    assert "far: it has FirecREST" in caplog.text


def test_a_facility_that_is_away_keeps_no_tokenizer_from_the_others(far: Path, tmp_path: Path):
    (tmp_path / "text").write_text("a small text\n")
    make_tokenizer(tmp_path / "workflow" / "model", tmp_path / "text")
    file = tmp_path / "workflow" / "federation.yml"
    entry = FEDERATION[FEDERATION.index("  - name: far") :]
    away = entry.replace("name: far", "name: away").replace("login.example.org", "away.example.org")
    file.write_text(FEDERATION.replace(entry, away + entry))
    ssh = tmp_path / "bin" / "ssh"
    away = 'case "$*" in *away.example.org*) echo "No route to host" >&2; exit 255 ;; esac'
    ssh.write_text(ssh.read_text().replace("\n", f"\n{away}\n", 1))
    found = []
    with pytest.raises(TransientError, match="^away did not take the tokenizer .*No route to host$"):
        for one in share_tokenizer(read_federation(file), weights=False):
            found.append((one.facility, one.sent))
    assert found == [("here", False), ("far", True)]
    assert (far / "it's a home" / "shared" / "model" / "tokenizer.json").is_file()


def test_what_a_facility_answers_to_a_tokenizer_has_an_end(far: Path, tmp_path: Path):
    """It would fill the coordinator's memory."""
    (tmp_path / "text").write_text("a small text\n")
    make_tokenizer(tmp_path / "workflow" / "model", tmp_path / "text")
    ssh = tmp_path / "bin" / "ssh"
    flood = 'case "${@: -1}" in *"tar xf"*) cat >/dev/null; head -c 30M /dev/zero >&2; exit 1 ;; esac'
    ssh.write_text(ssh.read_text().replace("\n", f"\n{flood}\n", 1))
    with pytest.raises(TransientError, match="^far did not take the tokenizer .*: more than 8 MiB for an answer$"):
        list(share_tokenizer(read_federation(tmp_path / "workflow" / "federation.yml"), weights=False))


def test_what_setup_prints_at_a_facility_moves_no_cursor_here(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Escape sequences that write the clipboard or over earlier lines, and a line without an end."""
    hostile = r"printf 'a\r\033[2J\033]52;c;eA==\a\u202eb\n' >&2; head -c 100000 /dev/zero | tr '\0' x; exit 0"
    monkeypatch.setattr("coordinator.remote_setup._send", lambda *_: None)
    monkeypatch.setattr("coordinator.remote_setup.setup_command", lambda *_, **__: hostile)
    set_up(read_federation(tmp_path / "workflow" / "federation.yml"), "far", bundle=None, arguments=[])
    said, complaints = capfd.readouterr()
    assert not complaints and said.replace("\n", "").isprintable()
    lines = said.splitlines()
    assert lines[:2] == ["a", "?[2J?]52;c;eA==??b"] and {len(line) for line in lines[2:]} <= {4096, 100000 % 4096}
    assert "".join(lines[2:]) == "x" * 100000

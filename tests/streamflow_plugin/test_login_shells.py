"""Accounts whose own shell is not a Bourne shell, and shells whose start-up files print: real ones, and a real sshd."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.streamflow_plugin import tree
from coordinator.streamflow_plugin.lanes import NOISE_BYTES, Answer, TransferFailed
from coordinator.streamflow_plugin.login_shell import in_any_shell, in_login_shell
from coordinator.streamflow_plugin.ssh import tethered
from tests.streamflow_plugin.local_sshd import SSHD
from tests.streamflow_plugin.test_patient_login import connector

SCRIPT = """printf '%s|' 'it'"'"'s' "a\\b!c" '\\\\' "$(id -un)" '\n'
cat; if [ ! -e /nowhere ]; then exit 5; fi
"""
SHELLS = [found for name in ("bash", "dash", "ksh", "zsh", "tcsh", "fish") if (found := shutil.which(name))]


@pytest.mark.parametrize("shell", SHELLS, ids=lambda path: Path(path).name)
def test_every_shell_runs_the_same_script(shell: str):
    """As `sh` alone does, which is the oracle: output, input and exit code."""
    expected = subprocess.run(["sh", "-c", SCRIPT], input=b"in!put", capture_output=True)
    assert expected.returncode == 5 and expected.stdout.endswith(b"in!put")
    for line in (in_any_shell(SCRIPT), in_login_shell(in_any_shell(SCRIPT))):
        found = subprocess.run([shell, "-c", line], input=b"in!put", capture_output=True)
        assert (found.stdout, found.returncode) == (expected.stdout, 5), found.stderr
    job = subprocess.Popen(
        [shell, "-c", in_any_shell(tethered("echo 'two\nlines!'\nexit 7"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None and job.stdout.read() == b"two\nlines!\n" and job.wait(10) == 7


def test_what_a_shell_is_given_means_the_same_to_all():
    """One word in single quotes, without what csh or fish replace there."""
    assert re.fullmatch(r"sh -c '[^'!\\\n]*'", in_any_shell(SCRIPT * 100))


@pytest.mark.skipif(not Path(SSHD).exists() or not shutil.which("tcsh"), reason="no sshd or no tcsh here")
@pytest.mark.parametrize("site", ['ForceCommand exec tcsh -f -c "$SSH_ORIGINAL_COMMAND"'], indirect=True)
def test_a_job_of_a_host_whose_shell_is_tcsh(site):
    site.sign("-1m:+1h")

    async def act() -> tuple[str, int | None]:
        one, location = connector(site)
        try:
            return await one.end_of(location, one.job_line("echo 'a'\necho b; exit 7"), 1000, 30)
        finally:
            await one.undeploy(False)

    assert asyncio.run(act()) == ("a\nb", 7)


NOISY = 'ForceCommand echo "3 NODES down"; echo 93%% of quota >&2; exec sh -c "$SSH_ORIGINAL_COMMAND"'


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")
@pytest.mark.parametrize("swift", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("site", [NOISY.replace("%%", "%")], indirect=True, ids=["noisy"])
def test_start_up_files_that_print_are_no_part_of_an_answer(site, tmp_path: Path, monkeypatch, swift: bool):
    """~/.bashrc is read for every ssh command; what it prints is neither a file's content nor a job in a queue."""
    site.sign("-1m:+1h")
    monkeypatch.setattr(tree, "SWIFT_BYTES", 0 if swift else 1 << 60)
    model = tmp_path / "model"
    (model / "below").mkdir(parents=True)
    for name, size in {"large": 3 << 20, "small": 1000, "below/empty": 0}.items():
        (model / name).write_bytes(os.urandom(size))

    async def act() -> object:
        one, location = connector(site)
        try:
            await one.copy_local_to_remote(str(model), str(tmp_path / "there"), [location])
            await one.copy_remote_to_local(str(tmp_path / "there"), str(tmp_path / "back"), location)
            await one.copy_remote_to_local(str(tmp_path / "there" / "small"), str(tmp_path / "small"), location)
            alone = await one.run(location, ["echo 7 R"], stdin=asyncio.subprocess.DEVNULL, capture_output=True)
            return [alone, *[await one.run(location, [f"echo {n} R"], capture_output=True) for n in (8, 9)]]
        finally:
            await one.undeploy(False)

    assert asyncio.run(act()) == [("7 R", 0), ("8 R", 0), ("9 R", 0)]
    assert (tmp_path / "small").read_bytes() == (model / "small").read_bytes()
    for path in (one for one in model.rglob("*") if one.is_file()):
        name = path.relative_to(model)
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "back" / name).read_bytes() == path.read_bytes()


@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")
def test_a_copy_that_the_facility_cannot_store_fails_with_its_words(site, tmp_path: Path):
    """Taken for made, the job would begin, spend its allocation, and blame what was cut off in storing it."""
    site.sign("-1m:+1h")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "in-the-way").write_text("a file")

    async def act() -> None:
        one, location = connector(site)
        try:
            there = str(tmp_path / "in-the-way" / "settings.json")
            await one.copy_local_to_remote(str(tmp_path / "settings.json"), there, [location])
        finally:
            await one.undeploy(False)

    with pytest.raises(TransferFailed, match="copying settings.json to .* failed: .*cannot create directory"):
        asyncio.run(act())


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_answer_begins_after_the_mark_however_it_comes_in(size: int):
    said = b"welcome\n$ crossfed-begins\nthe answer\ncrossfed-begins\n"
    answer = Answer("echo crossfed-begins; cat")
    got = b"".join(answer.of(said[start : start + size]) for start in range(0, len(said), size))
    assert got == b"the answer\ncrossfed-begins\n"
    silent = Answer("echo crossfed-begins; cat")
    assert silent.of(b"This account is for git only.") == b""
    with pytest.raises(TransferFailed, match="git only"):
        silent.check_begun()
    with pytest.raises(TransferFailed, match=f"more than {NOISE_BYTES} bytes"):
        [silent.of(bytes(size)) for _ in range(NOISE_BYTES // size + 1)]

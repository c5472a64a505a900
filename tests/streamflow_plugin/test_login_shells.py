"""Accounts whose own shell is not a Bourne shell, and shells whose start-up files print: real ones, and a real sshd."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.streamflow_plugin.login_shell import in_any_shell, in_login_shell
from coordinator.streamflow_plugin.ssh import tethered
from tests.streamflow_plugin.local_sshd import SSHD
from tests.streamflow_plugin.test_patient_login import connector

pytestmark = [pytest.mark.timeout(60)]
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

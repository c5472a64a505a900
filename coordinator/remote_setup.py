"""`crossfed setup FACILITY`: send CrossFed's code, or a whole bundle, to a facility and run `facility/setup.sh` there.

The same connection as in `crossfed check` and `crossfed run`; the facility needs no internet when a bundle is sent.

HOME/code/crossfed/     the facility's copy of the package and the templates
HOME/code/wheelhouse/   where a bundle was sent
HOME/code/job.sh        the facility's job template, for the self-check through its queue
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from coordinator.bundle import COMPLETE, copy_code
from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility, Federation
from coordinator.config.firecrest import FIRECREST
from coordinator.preflight.remote import check_connection, login_error, ssh_command
from facility.exchange.errors import InputError, TransientError
from facility.exchange.exit_codes import BROKE, ExitCode
from facility.exchange.messages.job_template import path_word
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.messages.template_inheritance import find_template, read_template

TEMPLATE = "job.sh"
LOCKED, GONE, THEIRS = int(ExitCode.TRANSIENT), 76, 77
"""Exit codes of our commands there: another set-up is at work, or began to send its code after we had; HOME is another
account's, or open to all."""
ALONE = f"exec 9>>.setup.lock && {{ flock -n 9 2>/dev/null || [ $? != 1 ] || exit {LOCKED}; }}"  # else: no locks there
"""Hold the lock of setup.sh in the current directory until the shell ends, or closes 9."""
FEW_LINES = 20
"""Of what tar complains of: on a full disk it is a line for each file."""
LONGEST_LINE = 4096
"""Bytes of what a facility prints that are shown in one line."""


def set_up(federation: Federation, name: str, *, bundle: Path | None, arguments: list[str]) -> None:
    """Send the code and run setup.sh with the environment, template and placeholders of federation.yml.

    `bundle`: folder made by `crossfed bundle`. `arguments`: further ones for setup.sh, such as `-- --input ...`.
    Raises `InputError` for a facility that cannot be set up so, a login that stays refused and what setup.sh says is to
    be changed; `TransientError` when the host does not answer or setup.sh fails otherwise.
    """
    deployment = _facility(federation, name).deployment
    if deployment.type == FIRECREST:
        raise InputError(f"facility {name!r} has FirecREST, which gives no shell: run facility/setup.sh there")
    if not deployment.host:
        raise InputError(f"facility {name!r} is on this machine: run facility/setup.sh here, if it needs one at all")
    if deployment.gate:
        raise InputError(f"facility {name!r} has a gate, which gives no shell: its own people run facility/setup.sh")
    if deployment.environment.image or deployment.environment.venv:
        raise InputError(f"facility {name!r} brings its own environment (image or venv): there is nothing to set up")
    if bundle is not None:
        check_bundle(bundle)  # before a login, which may want a second factor
    if (row := check_connection(name, deployment)).verdict != "ok":
        raise login_error(row, f"{name}: {row.found}; {row.fix}")
    with tempfile.TemporaryDirectory(prefix="crossfed-setup-") as scratch:
        folder = Path(scratch)
        copy_code(folder / "crossfed")
        if deployment.template:
            text = read_template(find_template(deployment.template, federation.file.parent))
            (folder / TEMPLATE).write_text(text, encoding="utf-8")
        _send(deployment, folder, bundle)
    command = shlex.join(["bash", "-lc", setup_command(deployment, wheelhouse=bundle is not None, arguments=arguments)])
    code = _relayed([*ssh_command(deployment), command])
    if code:
        said = f"facility/setup.sh at {name} ended with code {code}; its last lines above say why"
        raise InputError(f"{said}, and what to change") if code == ExitCode.INPUT else TransientError(said)


def _facility(federation: Federation, name: str) -> Facility:
    for facility in federation.facilities:
        if facility.name == name:
            return facility
    known = ", ".join(facility.name for facility in federation.facilities)
    raise InputError(f"there is no facility {name!r} in {federation.file}, expected one of {known}")


def check_bundle(bundle: Path) -> None:
    """Raise `InputError` for what is not a complete bundle."""
    if not (bundle / COMPLETE).is_file():
        raise InputError(f"{bundle} holds no {COMPLETE}: `crossfed bundle --out {bundle}` makes a bundle")


def _send(deployment: Deployment, folder: Path, bundle: Path | None) -> None:
    """Replace HOME/code by `folder` (and the bundle, if any); the old one stays until the new one is complete."""
    parts = ["-C", str(folder), "."]
    if bundle is not None:
        check_bundle(bundle)
        shutil.rmtree(folder / "crossfed")  # the bundle's own copy, which its digests cover
        parts += ["-C", str(bundle.resolve()), "."]
    home, new = path_word(deployment.environment.home), f"code.new.{secrets.token_hex(4)}"
    back = "{ [ -d code ] || [ ! -d code.old ] || mv code.old code; }"  # a connection broke within the swap below
    gone = 'for one in code.new*; do [ ! -d "$one" ] || mv "$one" "code.gone.$RANDOM$RANDOM" || exit; done'
    gone += "; { rm -rf code.gone.* 2>/dev/null || true; }"  # one that another tar still fills goes with the next
    open_to_all = "find . -maxdepth 0 -perm -0002"
    owners = f'"$(stat -c %u .)" in "$(stat -c %u {new})"|0) [ -z "$({open_to_all})" ]'  # as the file system shows us
    ours = f"{{ case {owners} ;; *) false ;; esac || {{ rmdir {new}; stat -c %U . >&2; exit {THEIRS}; }}; }}"
    begin = f"mkdir -m 700 -p {home} && cd {home} && {ALONE} && {back} && {gone} && rm -rf code.old"
    begin += f" && mkdir {new} && {ours}"
    unpack = f"tar xf - -C {new} 2>&1 | {{ head -n {FEW_LINES}; cat >/dev/null; }} >&2; code=${{PIPESTATUS[0]}}"
    arrive = f"umask 077; {begin} || exit; exec 9>&-; {unpack}; [ -d {new} ] || code={GONE}; exit $code"
    swap = f"cd {home} && {ALONE} && {{ [ -d {new} ] || exit {GONE}; }} && {{ [ ! -d code ] || mv code code.old; }}"
    swap += f" && mv {new} code && rm -rf code.old code.gone.*"
    packing = subprocess.Popen(["tar", "cf", "-", *parts], stdout=subprocess.PIPE)
    sent = _relayed(_there(deployment, arrive), packing.stdout)
    if packing.stdout is not None:
        packing.stdout.close()
    packed = packing.wait()
    if packed and not sent:
        raise TransientError(f"tar could not pack the code on this machine (code {packed}); its lines above say why")
    for code in (sent, 0 if sent else _relayed(_there(deployment, swap))):
        if code:
            said = _unsent(deployment, code)
            raise InputError(said) if code == THEIRS else TransientError(said)


def _unsent(deployment: Deployment, code: int) -> str:
    """Why the code did not get there, by the exit code of a command that was to keep it."""
    place = f"{deployment.environment.home}/code"
    if code == BROKE:
        return f"the connection to {deployment.host} broke while the code was sent; ssh says above why"
    if code == LOCKED:
        return f"another set-up works in {deployment.environment.home} at {deployment.host}; wait for it"
    if code == GONE:
        return f"another `crossfed setup` sends its code to {place} at {deployment.host}, in place of this one's"
    if code == THEIRS:
        return (
            f"{deployment.environment.home} at {deployment.host} is not your account's alone, whose jobs run what is "
            "there (its owner is named above): chmod o-w it if it is yours, else choose another `environment: home:`"
        )
    return (
        f"{deployment.host} could not keep the code in {place} (code {code}); the lines above say why: a full file "
        "system, a quota, or a folder that is another account's?"
    )


def _there(deployment: Deployment, script: str) -> list[str]:
    return [*ssh_command(deployment), shlex.join(["bash", "-c", script])]


def _relayed(words: list[str], given: IO[bytes] | None = None) -> int:
    """Exit code of a command that reads `given`; what it prints is shown as it comes, as text that moves no cursor."""
    with subprocess.Popen(
        words, stdin=given or subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while line := process.stdout.readline(LONGEST_LINE):
            for part in line.decode(errors="replace").splitlines():  # a progress bar ends its lines with \r
                print(clean_text(part, LONGEST_LINE, lines=True), flush=True)
    return process.returncode


def setup_command(deployment: Deployment, *, wheelhouse: bool, arguments: list[str]) -> str:
    """The shell command that runs setup.sh at the facility."""
    environment, code = deployment.environment, f"{deployment.environment.home}/code"
    words = ["bash", path_word(f"{code}/crossfed/facility/setup.sh"), "--home", path_word(environment.home)]
    for module in environment.modules:
        words += ["--module", shlex.quote(module)]
    if environment.conda:
        words += ["--conda", shlex.quote(environment.conda)]
    if wheelhouse:
        words += ["--wheelhouse", path_word(f"{code}/wheelhouse")]
    if deployment.template:
        words += ["--template", path_word(f"{code}/{TEMPLATE}")]
        for key, value in deployment.filled().items():
            words += ["--fill", shlex.quote(f"{key}={value}")]
    return " ".join([*words, *map(shlex.quote, arguments)])

"""`crossfed bundle`: everything a facility without internet needs to install, in one folder to copy there.

BUNDLE/wheelhouse/*.whl             every package, for that platform and Python
BUNDLE/wheelhouse/requirements.txt  the same packages by version and sha256, for `pip install --require-hashes`
BUNDLE/crossfed/                    facility/, templates/, pyproject.toml, constraints.txt
BUNDLE/evaluation/                  data sets of lm-eval's tasks, where they were asked for
BUNDLE/SHA256SUMS                   digest of every file above; `facility/setup.sh` verifies it before it installs
BUNDLE/sbom.json                    the packages as CycloneDX, where it was asked for
BUNDLE/bundle.json                  what it is for, written last
"""

from __future__ import annotations

import http.client
import os
import re
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from coordinator.bundle_contents import PARTS, SBOM, SUMS, cyclonedx_document, write_digests
from coordinator.evaluation_cache import fill_cache
from facility.exchange.addresses import hidden_login, without_login
from facility.exchange.errors import InputError, TransientError
from facility.exchange.files.durable import write_json
from facility.exchange.files.links import copy_tree
from facility.exchange.files.owners import first_not_ours
from facility.exchange.files.paths import CHECKOUT, shipped_path
from facility.exchange.files.storage import free_on, why_unwritable
from facility.exchange.messages.manifest import sha256_of

INDEX = {"cuda": "", "cpu": "https://download.pytorch.org/whl/cpu", "rocm": "https://download.pytorch.org/whl/rocm7.0"}
"""Extra package index that has each flavour of torch; the default index has CUDA's."""
EXTRA_INDICES = "PIP_EXTRA_INDEX_URL"
"""Variable that gives pip further indices: an address may hold a login, and all accounts see the words of a command."""
ANSWER_SECONDS = 20.0
"""How long an index may take to answer anything at all."""
END_SECONDS = 5.0
"""How long an interrupted pip may take to end, twice."""
NO_ROOM = 74
"""Exit code of a pip that met a full disk, a quota or a limit on file sizes (EX_IOERR of sysexits.h)."""
QUIETLY = f"""import errno, logging, runpy, signal, sys
refused = []
def in_one_line(record):
    error = record.exc_info[1] if record.exc_info else None
    while error and getattr(error, "errno", 0) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        error = error.__cause__ or error.__context__
    if error:
        refused.append(error)
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
logging.getLogger("pip._internal.cli.base_command").addFilter(in_one_line)
try:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
except SystemExit as end:
    sys.exit({NO_ROOM} if refused else end.code)"""
"""`python -m pip`, which says nothing of an interrupt while it imports, and one line of a disk that takes no more."""
COMPLETE = "bundle.json"
"""Written last: a folder without it is not a bundle."""
CODE = "crossfed"
FILES = ("pyproject.toml", "constraints.txt", "LICENSE")


def make_bundle(
    out: Path,
    *,
    python: str,
    platform: str,
    torch: str,
    index: str = "",
    sbom: bool = False,
    tasks: Sequence[str] = (),
    include: Path | None = None,
    run: Callable[[list[str], str], int] | None = None,
) -> dict[str, object]:
    """Make or complete the folder `out`; returns what bundle.json says. `run`: as `run_pip`.

    `sbom`: also write the packages as a CycloneDX document. `tasks`: add lm-eval and what these tasks of it read;
    `include`: a folder with YAML files of further tasks.
    """
    if not re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", python):
        raise InputError(f"--python-version is {python!r}, expected 3.11 or newer, such as 3.11")
    if not re.fullmatch(r"(many|musl)linux[0-9_]*_(x86_64|aarch64|ppc64le)", platform):
        raise InputError(
            f"--platform is {platform!r}, expected something like manylinux_2_28_x86_64 or manylinux_2_28_aarch64"
        )
    if include is not None and not (tasks and include.is_dir()):
        raise InputError(
            f"--eval-include is {str(include)!r}, expected a folder with YAML files of tasks that --eval names"
        )
    check_place(out)
    check_code(out / CODE)
    if tasks:  # first: a wrong name is found before gigabytes of packages come
        fill_cache(out, tasks, include=include)
    index = index or INDEX[torch]
    if run is None and index:
        ask_index(index)
    wheelhouse = out / "wheelhouse"
    wheelhouse.mkdir(parents=True, exist_ok=True)
    extras = ("eval",) if tasks else ()
    (out / COMPLETE).unlink(missing_ok=True)  # of an earlier one, until this one is whole
    remove_cut_off(wheelhouse)
    command = download(wheelhouse, python=python, platform=platform, extras=extras)
    code = (run or run_pip)(command, index)
    if code != 0:
        raise no_download(code, wheelhouse, f"a torch for {torch} on {platform}")
    shutil.rmtree(out / CODE, ignore_errors=True)
    copy_code(out / CODE)
    if sbom:
        write_json(out / SBOM, cyclonedx_document(wheelhouse))
    write_digests(out)
    files = {path.name: path.stat().st_size for path in sorted(wheelhouse.glob("*.whl"))}
    what: dict[str, object] = {
        "python": python,
        "platform": platform,
        "torch": torch,
        "files": files,
        "bytes": sum(files.values()),
        "tasks": list(tasks),
        "sha256sums": sha256_of(out / SUMS),
    }
    write_json(out / COMPLETE, what)
    return what


def no_download(code: int, wheelhouse: Path, wanted: str) -> InputError | TransientError:
    """Why pip, which ended with `code`, has not fetched everything: a full disk, or what else it may be."""
    ended = f"pip download ended with {code}"
    places = [wheelhouse, Path(tempfile.gettempdir())]
    if full := why_unwritable(places):
        return InputError(f"{ended}: {full}")
    if code != NO_ROOM:
        return TransientError(f"{ended}: is there a network, and is there {wanted}?")
    room = [f"{free_on(str(place))} in {place}" for place in places]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    raised = "" if limit == resource.RLIM_INFINITY else ", or raise the limit on file sizes (`ulimit -f`)"
    return InputError(
        f"{ended}: it found no room, see above; free some{raised}, then give the same command again: {room[0]}, and "
        f"{room[1]}, where pip puts all files first (TMPDIR names another)"
    )


def remove_cut_off(wheelhouse: Path) -> None:
    """Remove wheels of which a full disk or a kill left the beginning: pip takes them if an index has no digests."""
    for path in wheelhouse.glob("*.whl"):
        if not zipfile.is_zipfile(path):  # what says so is a wheel's end
            path.unlink()


def ask_index(index: str, *, seconds: float = ANSWER_SECONDS) -> None:
    """Ask torch's package index once, over the proxy that the environment names, whether it answers, whatever it says.

    pip asks a silent one for every package again and again, and then takes another flavour of torch from the default
    index. A login in the address is for pip alone. Raises `TransientError` where nothing answers within `seconds`,
    `InputError` for what is no address.
    """
    if re.match("file:", index, re.IGNORECASE):
        return
    if not re.match("https?://[^/]", index, re.IGNORECASE):
        named = "no address" if "@" in index else repr(index)  # a login may stand in it
        raise InputError(f"--torch-index is {named}, expected an address such as {INDEX['cpu']}")
    try:
        with urllib.request.urlopen(urllib.request.Request(without_login(index), method="HEAD"), timeout=seconds):
            pass
    except urllib.error.HTTPError:
        pass  # it answers: some indices list nothing at their root
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a port that is not a number
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return  # pip has certificates of its own settings
        raise TransientError(
            f"the package index {hidden_login(index)} does not answer ({reason}): give the same command where there is "
            f"a network, name a proxy by HTTPS_PROXY, or an index that has torch by --torch-index"
        ) from None


def run_pip(command: list[str], index: str = "") -> int:
    """Run pip, which looks into the package index `index`, too; returns its exit code.

    Ctrl-C ends it too, without a traceback, and is raised once it has cleaned up.
    """
    indices = " ".join(filter(None, [index, os.environ.get(EXTRA_INDICES, "")]))
    environment = os.environ | ({EXTRA_INDICES: indices} if indices else {})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: `QUIETLY` lets it in again
    try:
        process = subprocess.Popen(command, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return process.wait()
    except KeyboardInterrupt:
        end_pip(process)
        raise


def end_pip(process: subprocess.Popen[bytes]) -> None:
    """Wait until an interrupted pip has removed what it had half downloaded; interrupt it if it did not hear of it."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    process.kill()
    process.wait()


def check_place(out: Path) -> None:
    """Raise `InputError` where another account made the folder, or one in it, or may write it: a wheel that it leaves
    there, or exchanges later together with its digest, is installed at facilities."""
    if reason := first_not_ours([out, *(out / part for part in PARTS)]):
        raise InputError(f"{reason}, which decides what facilities install: choose another --out")


def check_code(target: Path) -> None:
    """Raise `InputError` where something else than an earlier bundle's code lies at `target`, which is replaced.

    A facility's own home is called `crossfed`, too, unless it is set otherwise.
    """
    if not os.path.lexists(target):
        return
    plain = target.is_dir() and not target.is_symlink()
    others = {path.name for path in target.iterdir()} - {"facility", "templates", *FILES} if plain else {"no folder"}
    if others:
        raise InputError(
            f"{target} is not the code of an earlier bundle (there is {', '.join(sorted(others)[:3])}), and would be "
            "replaced: choose another --out"
        )


def copy_code(target: Path) -> None:
    """What a facility needs of CrossFed itself, laid out as in a checkout."""
    copy_tree(CHECKOUT / "facility", target / "facility", leave=("__pycache__", "_data"))
    copy_tree(shipped_path("templates"), target / "templates")
    for name in FILES:
        shutil.copyfile(shipped_path(name), target / name)


def download(wheelhouse: Path, *, python: str, platform: str, extras: Sequence[str] = ()) -> list[str]:
    """The pip command that fetches wheels for another platform, older manylinux tags (newer systems run them) too."""
    project = tomllib.loads(shipped_path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = [*project["dependencies"]]
    for name in extras:
        dependencies += project["optional-dependencies"][name]
    found = re.fullmatch(r"(?:many|musl)linux_(\d+)_(\d+)_(.+)", platform)
    platforms = [platform]
    if found and platform.startswith("manylinux"):
        machine = found.group(3)
        platforms += [f"manylinux_2_{minor}_{machine}" for minor in range(int(found.group(2)) - 1, 16, -1)]
        platforms.append(f"manylinux2014_{machine}")
    command = [
        sys.executable,
        "-P",  # else a pip.py of the current folder would be run
        "-c",
        QUIETLY,
        "download",
        "--disable-pip-version-check",
        "--dest",
        str(wheelhouse),
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        "-c",
        str(shipped_path("constraints.txt")),
    ]
    for name in platforms:
        command += ["--platform", name]
    return [*command, "pip", "setuptools", "wheel", *dependencies]

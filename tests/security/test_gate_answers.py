"""What a gate answers about files, and does with them, is what the engine's own commands would."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

from coordinator.streamflow_plugin.gate import request_of
from tests.security.test_gate import Gate, site

__all__ = ["site"]

NAMES = ("file", "program", "folder", "folder/below", "to-file", "to-folder", "to-nothing", "missing", "file/below")
ASKED = [
    *(f"test {flag} {{p}}/{name}" for flag, name in itertools.product(("-e", "-d", "-f", "-L", "-x"), NAMES)),
    *(f"test -e {{p}}/{name} && readlink -f {{p}}/{name}" for name in NAMES),
    *(f"test -f {{p}}/{name} && sha1sum {{p}}/{name} | awk '{{{{print $1}}}}'" for name in NAMES),
    *(
        f"find -L {{p}}{name} -mindepth 1 -maxdepth 1 -type {kind}"
        for name, kind in itertools.product(("", "/folder", "/folder/below", "/to-folder"), "df")
    ),
]
DONE = [
    "mkdir -p {p}/folder {p}/new/deep/er {p}/new/deep",
    "mkdir -p {p}/new",
    "ln -snf {p}/new/deep {p}/link",
    "ln -snf {p}/file {p}/link",
    "ln -snf {p}/folder {p}/program",
    "rm -rf {p}/to-folder {p}/to-nothing {p}/missing",
    "rm -rf {p}/new/deep {p}/file",
    "rm -rf {p}/folder",
]


def made(place: Path) -> Path:
    (place / "folder" / "below").mkdir(parents=True)
    for name in ("file", "program", "folder/one", "folder/two"):
        (place / name).write_text(name)
    (place / "program").chmod(0o700)
    for name, target in (("to-file", "file"), ("to-folder", "folder"), ("to-nothing", "nothing")):
        (place / name).symlink_to(place / target)
    return place


def state(place: Path) -> dict[str, str]:
    """What lies there, by name: where a link leads, what a file holds."""
    found = {}
    for path in place.rglob("*"):
        what = (
            os.readlink(path).replace(str(place), "")
            if path.is_symlink()
            else ""
            if path.is_dir()
            else path.read_text()
        )
        found[path.relative_to(place).as_posix()] = what
    return found


def shell(commands: list[str]) -> list[tuple[int, list[str]]]:
    """Exit code and sorted lines of each."""
    said = subprocess.run(["bash", "-c", "".join(f"{one}; echo =$?=\n" for one in commands)], stdout=subprocess.PIPE)
    parts = said.stdout.decode().split("=")[:-1]
    return [(int(code), sorted(text.split())) for text, code in zip(parts[::2], parts[1::2], strict=True)]


def test_a_gate_answers_as_the_commands_that_it_stands_for_and_does_what_they_do(site: Gate):
    here, there = made(site.workdir / "in"), made(site.folder / "shell")
    for commands in (ASKED, *([one] for one in DONE)):
        for command, expected in zip(commands, shell([one.format(p=there) for one in commands]), strict=True):
            code, out, _ = site.ask(request_of(command.format(p=here)))
            assert (code, sorted(out.decode().replace(str(here), str(there)).split())) == expected, command
        assert state(here) == state(there), commands

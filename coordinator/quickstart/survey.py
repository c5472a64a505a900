"""What a site has, asked by one command over ssh: Python, modules, network, file systems, scheduler, data.

The answer is another institution's text: it is read up to a size, and only what has the expected form is used.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from coordinator.config.deployments import WORKDIR, Deployment
from coordinator.preflight.remote import run_there
from coordinator.preflight.ssh_errors import QUIET
from coordinator.schedulers.partition import Partition, allowed_words, first_number
from coordinator.schedulers.registry import schedulers
from coordinator.schedulers.scheduler import BatchScheduler
from facility.exchange.errors import TransientError
from facility.exchange.messages.job_template import path_word
from facility.exchange.messages.strict_json import clean_text

SECTION, ANSWERED = "crossfed-section", "crossfed-answered"
MOST_CHARACTERS = 4_000_000
NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "datasets")
PLACES = ("HOME", "WORK", "SCRATCH", "CINECA_SCRATCH", "PSCRATCH", "LUSTRE_SCRATCH", "FLASH", "VSC_SCRATCH")
"""Variables by which sites name an account's file systems."""
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")
SCRIPT = r"""set -o pipefail
ask() { timeout 20 "$@" 2>/dev/null </dev/null | head -c 400000; }
section() { printf '\n@SECTION@ %s\n' "$1"; }
section machine; uname -m
section python
for name in @PYTHONS@; do
    command -v "$name" >/dev/null && ask "$name" -I -c 'if True:
    import importlib.util, sys
    lacks = [name for name in "@NEEDED@".split() if importlib.util.find_spec(name) is None]
    print("%s|%d.%d|%s" % ("'"$name"'", sys.version_info[0], sys.version_info[1], ",".join(lacks)))'
done
section modules
type module >/dev/null 2>&1 && (module -t avail 2>&1 </dev/null | grep -i python | head -n 50)
section internet
if command -v curl >/dev/null
then timeout 8 curl -sSf -o /dev/null https://pypi.org/simple/pip/ 2>/dev/null && echo yes
else timeout 5 bash -c '</dev/tcp/pypi.org/443' 2>/dev/null && echo yes; fi
section places
for name in @PLACES@; do
    eval "path=\${$name-}"
    [ -n "$path" ] && [ -d "$path" ] && [ -w "$path" ] &&
        printf '%s|%s|%s\n' "$name" "$path" "$(ask df -Pk "$path" | awk 'NR == 2 { print $4 }')"
done
section gpus; ls -d /dev/nvidia[0-9]* 2>/dev/null
section data
if [ -f @DATA@/dataset.json ]; then echo prepared; elif [ -r @DATA@ ]; then echo text; else echo missing; fi
"""


@dataclass(frozen=True, kw_only=True)
class Python:
    """An interpreter that a login finds."""

    command: str
    version: tuple[int, int]
    lacks: tuple[str, ...]
    """Packages that a facility needs and that it does not have."""

    @property
    def recent(self) -> bool:
        return self.version >= (3, 11)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory of the account."""

    name: str
    """Variable that names it."""
    path: str
    free: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one site answered."""

    machine: str = ""
    pythons: tuple[Python, ...] = ()
    modules: tuple[str, ...] = ()
    internet: bool = False
    places: tuple[Place, ...] = ()
    gpus: int = 0
    """Of the host that was asked, for a site without a queue."""
    data: str = "missing"
    """Of the path that was asked for: `prepared`, `text` or `missing`."""
    scheduler: BatchScheduler | None = None
    partitions: tuple[Partition, ...] = ()
    accounts: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        return next((place.path for place in self.places if place.name == "HOME"), "")


def ask_site(name: str, deployment: Deployment, data: str) -> Survey:
    """Ask the site. `data`: path of text or of a prepared dataset there. Raises `TransientError` without an answer."""
    answer = run_there(deployment, script(data), seconds=240)
    if f"{SECTION} end" not in answer.out:
        said = (answer.error.strip() or answer.out.strip() or f"code {answer.code}").splitlines()[-1]
        raise TransientError(
            f"{name} does not answer a shell script: {clean_text(said, 300)}; {QUIET}; log in by hand and see"
        )
    return read_survey(answer.out)


def script(data: str) -> str:
    """What is asked of a site: general questions, then one of each scheduler that CrossFed knows."""
    place = path_word(data)
    text = SCRIPT
    for mark, value in {
        "SECTION": SECTION,
        "PYTHONS": " ".join(PYTHONS),
        "NEEDED": " ".join(NEEDED),
        "PLACES": " ".join(PLACES),
        "DATA": place,
    }.items():
        text = text.replace(f"@{mark}@", value)
    for one in _queues():
        known = f"command -v {one.program} >/dev/null"
        asked = f"ask bash -c {shlex.quote(one.survey)} && echo {ANSWERED}"
        text += f"section scheduler-{one.name}; {known} && {asked}\n"
    return text + "section end\n"


def read_survey(text: str) -> Survey:
    """Parse what `script` printed; lines of another form are passed over."""
    parts = re.split(rf"^{SECTION} ([a-z-]+)$", text[-MOST_CHARACTERS:], flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    pythons = re.findall(r"^(python[\d.]*)\|(\d{1,2})\.(\d{1,3})\|([\w,]*)$", said.get("python", ""), re.MULTILINE)
    places = re.findall(r"^([A-Z_]+)\|([^|]+)\|(\d*)$", said.get("places", ""), re.MULTILINE)
    used = next((one for one in _queues() if ANSWERED in said.get(f"scheduler-{one.name}", "")), None)
    answer = said.get(f"scheduler-{used.name}", "") if used else ""
    return Survey(
        machine=next(iter(re.findall(r"^\w{1,20}$", said.get("machine", ""), re.MULTILINE)), ""),
        pythons=tuple(
            Python(command=name, version=(int(major), int(minor)), lacks=tuple(filter(None, lacks.split(","))))
            for name, major, minor, lacks in pythons
        ),
        modules=tuple(
            word.split("(")[0].rstrip("/") for word in allowed_words(said.get("modules", "").replace("(", " ("))
        ),
        internet="yes" in said.get("internet", "").split(),
        places=tuple(
            Place(name=name, path=path.rstrip("/"), free=int(free[:12] or 0) * 1024)
            for name, path, free in places
            if name in PLACES and WORKDIR.fullmatch(path)
        ),
        gpus=len(re.findall(r"^/dev/nvidia\d+$", said.get("gpus", ""), re.MULTILINE)),
        data=next((word for word in ("prepared", "text") if word in said.get("data", "").split()), "missing"),
        scheduler=used,
        partitions=tuple(used.read_partitions(answer)) if used else (),
        accounts=tuple(used.read_accounts(answer)) if used else (),
    )


def _queues() -> list[BatchScheduler]:
    return [one for one in schedulers().values() if isinstance(one, BatchScheduler) and one.survey]


def version_of(module: str) -> tuple[int, ...]:
    """Version numbers in a module's name, for the newest: `python/3.11.6-gcc` is (3, 11, 6)."""
    found = re.search(r"/(\d+(?:\.\d+)*)", module)
    return tuple(first_number(part) for part in found[1].split(".")) if found else ()

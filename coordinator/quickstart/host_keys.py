"""An unknown host key is accepted only when its fingerprint was given or a person compared it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from coordinator.config.deployments import Deployment
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.propose import Proposal
from facility.exchange.errors import InputError
from facility.exchange.files.durable import append_lines
from facility.exchange.messages.signatures import FINGERPRINT

SECONDS = 20


def trust(dialog: Dialog, name: str, login: Deployment) -> bool:
    """Ask about the host's keys; add the one whose fingerprint was confirmed to known_hosts. True if one was added."""
    shown = {fingerprint: line for line in scan(login) if (fingerprint := fingerprint_of(line))}
    if not shown:
        return False
    question = f"{name}.host-key"
    if dialog.yes and question not in dialog.given:
        raise InputError(
            f"{login.host} is not in known_hosts; it shows {', '.join(shown)}. Compare with what the site publishes, "
            f"then give --answer {question}=FINGERPRINT"
        )
    why = f"{login.host} shows {', '.join(shown)}; type the fingerprint that the site publishes"

    def another(answer: str) -> str:
        return "" if answer in shown else f"{login.host} shows {', '.join(shown)}, not {answer!r}: ask the site"

    answer = dialog.ask(question, Proposal(value="", why=why), refuse=another)
    file = Path(login.known_hosts or "~/.ssh/known_hosts").expanduser()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    append_lines(file, shown[answer] + "\n")
    return True


def scan(login: Deployment) -> list[str]:
    """Lines for known_hosts, as ssh-keyscan reads them from the host."""
    bare, port = login.host, ""
    if found := re.fullmatch(r"(\[.*\]|[^:]+):(\d+)", login.host):
        bare, port = found[1], found[2]
    command = ["ssh-keyscan", "-T", "10", *(["-p", port] if port else []), bare.strip("[]")]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in answer.splitlines() if re.fullmatch(r"\S+ (ssh|ecdsa)-[\w-]+ [A-Za-z0-9+/=]+", line)]


def fingerprint_of(line: str) -> str:
    answer = subprocess.run(
        ["ssh-keygen", "-lf", "-"], input=line + "\n", capture_output=True, text=True, errors="replace"
    ).stdout
    found = FINGERPRINT.search(answer)
    return found[0] if found else ""

"""Reference pages made from the code: settings, commands, registries. Called by `docs/conf.py` at every build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COMMANDS = (
    "init",
    "model",
    "setup",
    "quickstart",
    "share",
    "check",
    "render",
    "run",
    "status",
    "report",
    "publish",
    "explain",
    "schema",
    "plan",
    "demo",
    "bundle",
    "audit",
    "rewind",
    "login",
    "conformance",
    "testbed",
)
SCRIPTS = ("facility/setup.sh", "coordinator/setup.sh")
MODULES = (
    "coordinator.aggregate",
    "coordinator.plan",
    "coordinator.simulate",
    "coordinator.model",
    "facility.prepare",
    "facility.base_model",
    "facility.train",
    "facility.launch",
    "facility.round",
    "facility.measure",
    "facility.probe",
    "facility.selfcheck",
    "facility.evaluate",
    "facility.conformance",
    "facility.keys",
    "facility.unmask",
    "facility.gate",
    "facility.audit",
)


def generate(out: Path) -> None:
    """Write settings.md, commands.md, registries.md and faults.md below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "commands.md").write_text(commands(), encoding="utf-8")
    (out / "settings.md").write_text(settings(), encoding="utf-8")
    (out / "registries.md").write_text(registries(), encoding="utf-8")
    (out / "faults.md").write_text(faults(), encoding="utf-8")


def commands() -> str:
    """`--help` of every command, in the order in which a new user meets them."""
    shown = [(f"crossfed {name}", [sys.executable, "-m", "coordinator.cli", name]) for name in COMMANDS]
    shown += [(f"bash {script}", ["bash", script]) for script in SCRIPTS]
    shown += [(f"python -m {module}", [sys.executable, "-m", module]) for module in MODULES]
    lines = []
    for title, command in shown:
        lines += [f"## {title}", "", "```text", _help(command), "```", ""]
    return "\n".join(lines)


def settings() -> str:
    """Every key of federation.yml with type, default and what it means."""
    from coordinator.config.reference import section_pages

    return "\n".join(section_pages().values())


def registries() -> str:
    """One table per registry: name, summary, parameters, needs, citation."""
    from docs.registries import REGISTRIES

    lines = []
    for title, describe in REGISTRIES.items():
        lines += [f"## {title}", "", "| name | what it does | parameters | source |", "|---|---|---|---|"]
        for one in describe():
            parameters = ", ".join(
                f"`{p['name']}` = {p['default']}" if "default" in p else f"`{p['name']}`" for p in one["parameters"]
            )
            lines.append(f"| `{one['name']}` | {_cell(one['summary'])} | {parameters} | {_cell(one['citation'])} |")
        lines.append("")
    return "\n".join(lines)


def faults() -> str:
    """What `tests/bench/faults.py` measured: each cause, the seconds until the console's sentence, the sentence."""
    measured = json.loads((Path(__file__).parent / "reference" / "faults.json").read_text(encoding="utf-8"))
    rows = measured["rows"]
    loads = sorted(row["load"] for row in rows)
    lines = [
        f"Measured on {measured['cores']} cores, which other work shared: {loads[0]:g} to {loads[-1]:g} runnable "
        f"tasks a core. An undisturbed run came to its first step after {measured['start_seconds']:g} s at most.",
        "",
        "| step | cause | seconds | recovered | the console's sentence |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['step']} | {_cell(row['cause'])} | {row['seconds']:.1f} | {'yes' if row['recovered'] else 'no'} "
        f"| {_cell(row['sentence'])} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _help(command: list[str]) -> str:
    """What `command --help` prints; a command that cannot be shown ends the build."""
    done = subprocess.run(
        [*command, "--help"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        cwd=Path(__file__).resolve().parent.parent,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} --help ends with {done.returncode}: {done.stderr}")
    return done.stdout.strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

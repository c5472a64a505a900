"""Bytes that one round reads and writes beyond what it must, by the kernel's own counters. Prints JSON.

    python tests/bench/bytes.py [--hidden 512] [--facilities 2] [--rounds 3] [--out FILE]
    python tests/bench/bytes.py [--encoding delta-int8] [--lora 8] [--rule RULE] [--masks]
    python tests/bench/bytes.py --transfer ssh|system [--hidden 768]

A federation of local facilities runs under StreamFlow, once with a model of --hidden and once with a tiny one. Every
workflow step is started through this file, which writes down what /proc/PID/io says of the step and all its
descendants: `rchar` and `wchar`, bytes through read and write calls, page cache or not. The difference between the two
models is what weights cost; interpreter, libraries and logs are in both and cancel out.

What a round must move: a facility reads the model and writes the update once; the coordinator reads every update as it
has travelled and the server state, and writes the model and the state. A facility's optimizer state is read and written
once, too, and so is what fixed point or an encoding leaves of an update for the next round (both are counted as
`optimizer_state`).
Training reads weights through `mmap` in places, which these counters do not see: reads of `train` are a lower bound.
`--transfer ssh` reaches the facilities by an sshd of its own on this machine through the plug-in's connector, whose
large files go through the system's ssh (models from 32 MB on, --hidden 768); `system` takes the system's ssh for
everything (`ssh: system`). They tell what moves models: a process that hands bytes to the next through a pipe or a
socket reads and writes them once more, all of which counts. Beside calls stand `write_bytes`, the bytes that became
dirty pages of files: pipes and sockets are not in these (a memory file system neither). What transfers wrote to files
is stated over the updates taken in (the engine) and over the models sent (sshd).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from tests.bench.own_sshd import own_sshd
from tests.engine.engines import measured_environment, streamflow
from tests.federations import write_federation
from tests.masking.federation import ssh_keys

LOG = "CROSSFED_BYTES_LOG"
TINY = 32
COUNTERS = ("rchar", "wchar", "write_bytes")
AVERAGING = ("receive", "aggregate", "aggregate_masked")
"""Steps of the coordinator between the arrival of updates and the next model."""


def counters(pid: int | str = "self") -> dict[str, int]:
    """Of a process and of every child that it has waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def counted(log: str, command: list[str]) -> int:
    """Run a step, and append its bytes to the log."""
    before = counters()
    code = subprocess.run(command).returncode
    after = counters()
    entry = {key: after[key] - before[key] for key in COUNTERS}
    with open(log, "a") as file:
        file.write(json.dumps({"step": command[command.index("-m") + 1].rpartition(".")[2], **entry}) + "\n")
    return code


def run(
    root: Path,
    hidden: int,
    facilities: int,
    rounds: int,
    training: dict[str, Any],
    changes: dict[str, Any],
    transfer: str,
    masks: bool,
) -> tuple[dict[str, dict[str, float]], dict[str, int]]:
    """Bytes a call of each step in the last round's steady state, and the sizes of what moves."""
    size = {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    names = [f"site{number}" for number in range(facilities)]
    changes = changes | {"rounds": rounds, "final_evaluation": False}
    if masks:
        changes |= _signed(signers := ssh_keys(root / "keys", names))
    path = write_federation(root, names, training={"steps": 1} | training, size=size, **changes)
    if masks:
        described = yaml.safe_load(path.read_text())
        for one in described["facilities"]:
            one["training"] = {"signing_key": str(signers.with_name(one["name"]))}
        path.write_text(yaml.safe_dump(described, sort_keys=False))
    log = root / "bytes.jsonl"
    with ExitStack() as stack:
        sshd = None
        if transfer != "local":
            sshd = stack.enter_context(own_sshd(root / "sshd", root / "engine" / "home"))
            described = yaml.safe_load(path.read_text())
            for one in described["facilities"]:
                deployment = sshd.deployment | ({"ssh": "system"} if transfer == "system" else {})
                one |= {"deployment": deployment, "dataset": str(root / "sites" / one["name"] / "dataset")}
            path.write_text(yaml.safe_dump(described, sort_keys=False))
        write_rendered(read_federation(path))
        python = sys.executable  # a login shell may find another one
        for tool in (root / "cwl" / "tools").glob("*.cwl"):
            mine = f"baseCommand: [{python}, {Path(__file__).resolve()}, --counted, {log}, --, {python},"
            tool.write_text(tool.read_text().replace("baseCommand: [python3,", mine))
        began, far = counters(), counters(sshd.pid) if sshd else {}
        folder = root / "engine"
        result = streamflow(path, folder, timeout=1200, environment=measured_environment(folder))
        ended = counters()
        far = {key: value - far[key] for key, value in counters(sshd.pid).items()} if sshd else {}
    archive = Archive(read_federation(path).archive_path)
    if result.returncode or len(archive.rounds()) != rounds:
        raise SystemExit(f"the federation did not end well: {result.stdout[-3000:]}")
    steps: dict[str, list[dict[str, int]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        steps[entry.pop("step")].append(entry)
    calls = {
        step: {key: sum(entry[key] for entry in entries[-(len(entries) // rounds or 1) :]) for key in COUNTERS}
        for step, entries in steps.items()
    }
    away = ("round",) if far else ()  # under sshd, not under the engine
    here = {key: sum(e[key] for name in steps if name not in away for e in steps[name]) for key in COUNTERS}
    calls["engine, a round"] = {key: (ended[key] - began[key] - here[key]) / rounds for key in COUNTERS}
    if far:
        there = {key: sum(entry[key] for entry in steps["round"]) for key in COUNTERS}
        calls["sshd, a round"] = {key: (far[key] - there[key]) / rounds for key in COUNTERS}
    state = archive.state_for(rounds)
    assert state is not None
    sizes = {
        "model": open_checkpoint(archive.model_for(rounds)).bytes,
        "updates": sum(row.received_bytes for row in archive.read_round(rounds - 1).facilities),
        "server_state": sum(file.stat().st_size for file in state.rglob("*.safetensors")),
        "optimizer_state": sum(
            file.stat().st_size for file in (root / "sites" / names[0]).rglob(f"round-{rounds - 1}/*.safetensors")
        ),
    }
    return calls, sizes


def _signed(signers: Path) -> dict[str, Any]:
    """What secure aggregation needs of federation.yml."""
    privacy = {"secure_aggregation": True, "peer_signers": str(signers), "minimum_sum": 2}
    return {"privacy": privacy, "aggregation": {"rule": "mean", "clip_ratio": 0, "allowed_signers": str(signers)}}


def report(arguments: argparse.Namespace) -> dict[str, object]:
    measured = []
    training: dict[str, Any] = {"lora": {"rank": arguments.lora}} if arguments.lora else {}
    if arguments.encoding != "full":
        training |= {"encoding": arguments.encoding}
    if arguments.encoding != "full" or arguments.masks:
        training |= {"export_dtype": "float32"}
    changes: dict[str, Any] = {"aggregation": {"rule": arguments.rule}} if arguments.rule else {}
    for hidden in (arguments.hidden, TINY):
        with tempfile.TemporaryDirectory(prefix="crossfed-bytes-") as folder:
            measured.append(
                run(
                    Path(folder),
                    hidden,
                    arguments.facilities,
                    arguments.rounds,
                    training,
                    changes,
                    arguments.transfer,
                    arguments.masks,
                )
            )
    (large, sizes), (small, tiny) = measured
    steps = {step: {key: large[step][key] - small[step][key] for key in COUNTERS} for step in large}
    n, updates, model, state, moments = (
        arguments.facilities,
        sizes["updates"] - tiny["updates"],
        sizes["model"] - tiny["model"],
        sizes["server_state"] - tiny["server_state"],
        sizes["optimizer_state"] - tiny["optimizer_state"],
    )
    must = {
        "train": {"rchar": n * (model + moments), "wchar": updates + n * moments},
        "coordinator": {"rchar": updates + state, "wchar": model + state},
    }
    done = {"train": steps["round"], "coordinator": {}}
    for key in ("rchar", "wchar"):
        done["coordinator"][key] = sum(steps[step][key] for step in AVERAGING if step in steps)
    return {
        "facilities": n,
        "transfer": arguments.transfer,
        "updates_bytes": updates,
        "model_bytes": model,
        "server_state_bytes": state,
        "optimizer_state_bytes": moments,
        "steps_a_round": {step: {key: round(value) for key, value in of.items()} for step, of in steps.items()},
        "over_what_is_needed": {
            side: {
                what: round(done[side][key] / must[side][key], 3)
                for what, key in (("read", "rchar"), ("written", "wchar"))
            }
            for side in must
        },
        "files_written_by_transfers_over_what_moved": {
            who: round(steps[f"{who}, a round"]["write_bytes"] / amount, 3)
            for who, amount in (("engine", updates), ("sshd", n * model))
            if arguments.transfer != "local"
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    if sys.argv[1:2] == ["--counted"]:
        return counted(sys.argv[2], sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="width of the model; 512: 9 million parameters")
    parser.add_argument("--facilities", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--encoding", default="full", help="of the updates")
    parser.add_argument("--rule", help="aggregation rule; default: the federation's own default")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters of this rank; default: whole models"
    )
    parser.add_argument("--masks", action="store_true", help="secure aggregation")
    parser.add_argument(
        "--transfer", choices=("local", "ssh", "system"), default="local", help="how models reach facilities"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    text = json.dumps(report(arguments), indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())

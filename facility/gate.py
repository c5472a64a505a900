"""`crossfed-gate`: the one command that a coordinator's key may run here, by a forced command in authorized_keys.

    restrict,command="/home/alice/crossfed/crossfed-gate SHA256:..." ssh-ed25519 AAAA... coordinator

Reads the request from SSH_ORIGINAL_COMMAND, holds it against a strict grammar and the site's policy.yml, does it
without a shell, and writes every decision into an audit log whose lines are chained (`python -m facility.audit`).
`facility/setup.sh --gate` installs it; docs/how-to/run-behind-a-gate.md has the policy's keys.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from facility.exchange.errors import ConfigurationError, CrossFedError
from facility.exchange.exit_codes import ExitCode
from facility.gating import grammar
from facility.gating.grammar import Request
from facility.gating.log_share import LogFull, check_log_share
from facility.gating.policy import STATE, Policy, read_policy
from facility.gating.refusal import Refused
from facility.gating.search_paths import keep_absolute
from facility.gating.session import Session
from facility.gating.several import check_others
from facility.gating.slots import one_of_many

VERSION = 2
"""Of the requests and their answers; 1 did not know `test-settings`."""
SINK_BYTES = 64 << 20

WHERE = {
    "test": "transfers:test",
    "resolve": "transfers:resolve",
    "sha1": "transfers:sha1",
    "walk": "transfers:walk",
    "make": "transfers:make",
    "remove": "transfers:remove",
    "link": "transfers:link",
    "put-tree": "transfers:put_tree",
    "put-file": "transfers:put_file",
    "put-piece": "transfers:put_piece",
    "sizes": "transfers:sizes",
    "list": "transfers:listing",
    "get-tree": "transfers:get_tree",
    "get-file": "transfers:get_file",
    "get-piece": "transfers:get_piece",
    "submit": "jobs:submit",
    "run": "jobs:submit",
    "submit-ahead": "ahead:submit_ahead",
    "hand-over": "ahead:hand_over",
    "waited": "ahead:waited",
    "keys": "login_commands:keys",
    "unmask": "login_commands:unmask",
    "test-job": "jobs:test_job",
    "test-settings": "approval:test_settings",
    "jobs": "queue:jobs",
    "cancel": "queue:cancel",
    "cancel-waiting": "queue:cancel",
    "cancel-ids": "queue:cancel_ids",
    "states": "queue:states",
    "begins": "queue:begins",
    "ending": "queue:ending",
    "output": "queue:output",
}
"""Where each verb is done; imported when it is asked for, since the gate starts once for every request."""


def hello(session: Session, request: Request) -> int:
    """What the coordinator has to know of this place, as JSON."""
    policy = session.policy
    session.workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    summary = {
        "gate": VERSION,
        "facility": policy.facility,
        "federations": policy.federations,
        "scheduler": policy.scheduler,
        "workdir": str(session.workdir),
        "nodes": policy.nodes,
        "hours": policy.hours,
        "cores": os.cpu_count() or 1,
        "memory_mb": memory >> 20,
        "masks": policy.peer_signers is not None,
        "minimum_sum": policy.minimum_sum,
        "ahead_seconds": policy.ahead_seconds,
        "datasets": policy.datasets,
        "free_mb": shutil.disk_usage(session.workdir).free >> 20,
    }
    print(json.dumps(summary))
    return 0


def hold(session: Session, request: Request) -> int:
    """Keep the connection for others to share, until the input ends."""
    print(flush=True)
    while sys.stdin.buffer.read(1):
        pass
    return 0


def sink(session: Session, request: Request) -> int:
    """Take bytes and forget them, to measure the link."""
    left = SINK_BYTES
    while left and (block := sys.stdin.buffer.read(min(left, 1 << 20))):
        left -= len(block)
    return 0


def probe(session: Session, request: Request) -> int:
    """`python -m facility.probe` for a dataset of the policy's; reserves no more than may come in within a day."""
    from facility.exchange.files.locks import take_lock
    from facility.gating.approval import check_dataset

    dataset = check_dataset(session, request["dataset"])
    command = [sys.executable, "-m", "facility.probe", "--dataset", str(dataset), "--workdir", str(session.workdir)]
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths.rstrip(os.pathsep)}
    reserve = min(int(request["reserve"]), session.policy.bytes_in_per_day)
    with open(session.state / "probe.lock", "ab") as lock:  # one at a time: together they would fill the disk
        take_lock(lock.fileno(), Path(lock.name))
        return subprocess.run(
            [*command, "--reserve", str(reserve)], env=environment, stdin=subprocess.DEVNULL
        ).returncode


HERE = {"hello": hello, "nothing": lambda session, request: 0, "hold": hold, "sink": sink, "probe": probe}


def serve(session: Session, command: str | None) -> int:
    """Decide on one request, write the decision down, and do it. Returns the exit code."""
    asked = (command or "")[:1000]
    try:
        check_log_share(session.log, session.policy.log_bytes_per_day)
        if session.key not in session.policy.keys:
            raise Refused(f"the key {session.key} is not one of the policy's")
        request = grammar.parse_request(command)
        asked = shlex.join(shlex.split(command or ""))  # blanks and quotes cannot push a word off the log's line
        with one_of_many(session.state):
            session.write("request", request=asked)
            if request.verb in HERE:
                return HERE[request.verb](session, request)
            module, _, function = WHERE[request.verb].partition(":")
            return int(getattr(importlib.import_module(f"facility.gating.{module}"), function)(session, request))
    except Refused as error:
        if not (isinstance(error, LogFull) and error.told):
            session.write("refused", request=asked, reason=str(error)[:1000])
        print(f"refused by the gate: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    except BrokenPipeError:  # the client is gone: a look at a job's progress ends with the job
        session.write("broken off", request=asked)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains at its own end
        return ExitCode.INPUT
    except Exception as error:  # whatever it is, it is on record
        reason = str(error) if isinstance(error, CrossFedError | OSError | ValueError) else repr(error)
        session.write("failed", request=asked, reason=reason[:1000])
        print(f"error: {reason}", file=sys.stderr)
        return ExitCode.INPUT


def check(policy_file: Path) -> str:
    """A line on a policy that can be used beside all others of its home. Raises `ConfigurationError`."""
    policy = _own_policy(policy_file, later=True)
    if not policy.coordinators.is_file():
        raise ConfigurationError(
            f"coordinators {policy.coordinators} does not exist; write the public keys of the "
            "coordinators there, as ssh's allowed signers",
            file=policy_file,
        )
    return f"{policy_file}: {policy.facility} in {', '.join(policy.federations)}, keys: {len(policy.keys)}"


def _own_policy(policy_file: Path, *, later: bool = False) -> Policy:
    """This gate's policy, which shares nothing with those of earlier gates. Raises `ConfigurationError`.

    `later`: nor with those of later ones.
    """
    policy = read_policy(policy_file)
    if home := os.environ.get("CROSSFED_HOME"):
        check_others(policy_file, policy, Path(home), later=later)
    return policy


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m facility.gate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--policy", type=Path, required=True, metavar="FILE", help="the site's policy.yml")
    add("--key", default="", metavar="SHA256:...", help="fingerprint of the key that comes in (the forced command)")
    add("--check", action="store_true", help="read the policy, print what it is for, and end")
    arguments = parser.parse_args(argv)
    os.umask(0o077)
    os.environ["LC_ALL"] = "C"
    keep_absolute()
    try:
        if arguments.check:
            print(check(arguments.policy))
            return 0
        policy = _own_policy(arguments.policy)
        state = arguments.policy.absolute().parent / STATE
        state.mkdir(mode=0o700, exist_ok=True)
        session = Session(policy=policy, key=arguments.key, state=state)
        return serve(session, os.environ.get("SSH_ORIGINAL_COMMAND"))
    except (CrossFedError, OSError) as error:  # without a sound policy or a log that can be written, nothing is done
        print(f"error: the gate is closed: {error}", file=sys.stderr)
        return ExitCode.INPUT


if __name__ == "__main__":
    sys.exit(main())

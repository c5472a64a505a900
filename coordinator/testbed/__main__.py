"""`python -m coordinator.testbed up | run | status | stop | start | shape | down`: rehearse on two real facilities."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from coordinator.testbed import daemons, link, rehearsal, stand
from coordinator.testbed.layout import DEFAULT_ROOT, Testbed, load
from facility.exchange.errors import exit_on_error
from facility.exchange.logs import add_log_options

SHAPE = (
    "[FACILITY:]rate=200mbit,rtt=100ms,loss=0.1%%: bandwidth and loss each way, round-trip time added; any of the "
    "three; without FACILITY for all; may be given again"
)


def parser() -> argparse.ArgumentParser:
    """Every option with its unit and default."""
    result = argparse.ArgumentParser(
        prog="crossfed testbed",
        description="Two real facilities on this machine: sshd, munge and a Slurm cluster of two nodes with stand-in "
        "GPUs each, in namespaces of their own. Needs root on Debian or Ubuntu.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--root", type=Path, default=DEFAULT_ROOT, help=f"directory of the testbed's files (default {DEFAULT_ROOT})"
    )
    common.add_argument("--json", action="store_true", help="print one JSON object")
    add_log_options(common)
    verbs = result.add_subparsers(dest="verb", required=True)

    up = verbs.add_parser("up", parents=[common], help="stand the facilities up")
    up.add_argument(
        "--facility", action="append", metavar="NAME", help="a facility's name; repeat for more (default site-a site-b)"
    )
    up.add_argument("--shape", action="append", default=[], metavar="SHAPE", help=SHAPE)
    up.add_argument("--no-install", action="store_true", help="do not install missing packages, name them")

    run = verbs.add_parser("run", parents=[common], help="run a federation over the facilities, or go on with it")
    run.add_argument("--rounds", type=int, default=2, help="rounds of the federation (default 2)")

    verbs.add_parser("status", parents=[common], help="what is up")
    for verb in ("stop", "start"):
        one = verbs.add_parser(verb, parents=[common], help=f"{verb} one service of one facility")
        one.add_argument("facility")
        one.add_argument("service", choices=daemons.SERVICES)
    shape = verbs.add_parser("shape", parents=[common], help="change the links")
    shape.add_argument("shape", nargs="*", help=SHAPE + "; none: take every shape away")
    verbs.add_parser("down", parents=[common], help="end every process, remove namespaces, users and files")
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    start = time.monotonic()
    if options.verb == "up":
        names = options.facility or ["site-a", "site-b"]
        testbed = stand.up(options.root, names, shapes=_shapes(options.shape, names), install=not options.no_install)
        _print_status(options.json, _status(testbed), f"up after {time.monotonic() - start:.1f} s")
        return 0
    if options.verb == "down":
        gone = stand.down(options.root)
        _print(options.json, {"removed": gone}, "\n".join(f"removed {line}" for line in gone))
        return 0
    testbed = load(options.root.resolve())
    if options.verb == "run":
        return rehearsal.run(testbed, rounds=options.rounds)
    if options.verb == "status":
        _print_status(options.json, _status(testbed), "standing")
    elif options.verb == "shape":
        names = [site.name for site in testbed.sites]
        wanted = _shapes(options.shape, names)
        how = {site.name: link.apply(site, wanted.get(site.name, link.Shape())) for site in testbed.sites}
        _print(options.json, how, "\n".join(f"{name}: {way}" for name, way in how.items()))
    else:
        site = testbed.site(options.facility)
        (daemons.stop if options.verb == "stop" else daemons.start)(site, options.service)
        done = "stopped" if options.verb == "stop" else "started"
        _print(options.json, {options.service: done}, f"{site.name}: {options.service} {done}")
    return 0


def _shapes(texts: list[str], names: list[str]) -> dict[str, link.Shape]:
    """One shape a facility; a named one wins over the general one."""
    result: dict[str, link.Shape] = {}
    for name, shape in sorted((link.parse(text) for text in texts), key=lambda pair: pair[0] is not None):
        for target in [name] if name else names:
            if target not in names:
                raise link.InputError(f"--shape names {target!r}, which is none of {', '.join(names)}")
            result[target] = shape
    return result


def _status(testbed: Testbed) -> dict[str, object]:
    """The summary with what answers now."""
    result = testbed.summary()
    result["services"] = {
        site.name: {
            service: all(daemons.pid(file) for file in daemons.pid_files(site, service)) for service in daemons.SERVICES
        }
        for site in testbed.sites
    }
    return result


def _print_status(as_json: bool, status: dict, headline: str) -> None:
    lines = [f"testbed {headline}: {status['root']}"]
    for site in status["facilities"]:
        services = status["services"][site["name"]]
        off = [name for name, alive in services.items() if not alive]
        lines.append(
            f"  {site['name']}: {site['user']}@{site['host']}, Slurm partition {site['partition']}, nodes "
            f"{' '.join(site['nodes'])}" + (f"; NOT RUNNING: {', '.join(off)}" if off else "")
        )
    first = status["facilities"][0]["name"]
    lines += [
        f"log in:    ssh -F {status['ssh_config']} {first}",
        f"run with:  HOME={status['home']} (its .ssh/known_hosts and key are what StreamFlow reads)",
    ]
    _print(as_json, status, "\n".join(lines))


def _print(as_json: bool, value: object, text: str) -> None:
    print(json.dumps(value, indent=2) if as_json else text, flush=True)


if __name__ == "__main__":
    raise SystemExit(exit_on_error(main))

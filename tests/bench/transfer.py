"""Moving models over the testbed, side by side: StreamFlow's own connector, ours, `tar | ssh` and rsync. Prints JSON.

    python tests/bench/transfer.py speed [--megabytes 1000]     a plain link: MB/s both ways
    python tests/bench/transfer.py wan   [--megabytes 400]      100 ms round trip: one stream and several connections
    python tests/bench/transfer.py rounds [--rounds 3]          seconds from a round's last job to the next's first

Needs root, sshd and Slurm (see coordinator/testbed). What it makes below /var/tmp is removed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from streamflow.core.deployment import ExecutionLocation
from streamflow.deployment.connector.ssh import SSHConnector

from coordinator.streamflow_plugin import ssh as ours
from coordinator.testbed import link, stand
from coordinator.testbed.layout import Site, Testbed


@contextlib.contextmanager
def testbed(names: list[str]) -> Iterator[tuple[Testbed, Path]]:
    """A testbed and a folder, both gone afterwards."""
    root = Path(tempfile.mkdtemp(prefix="crossfed-bench-", dir="/var/tmp"))
    try:
        standing = stand.up(root / "testbed", names)
        os.environ["HOME"] = str(standing.coordinator_home)
        (root / "here").mkdir()
        try:
            yield standing, root / "here"
        finally:
            stand.down(root / "testbed")
    finally:
        shutil.rmtree(root)


def checkpoint(folder: Path, megabytes: int) -> Path:
    """Random bytes as a checkpoint lays them: two shards and small files."""
    model = folder / "model"
    model.mkdir()
    for number in (1, 2):
        with open(model / f"model-0000{number}-of-00002.safetensors", "wb") as file:
            for _ in range(megabytes // 2):
                file.write(os.urandom(1_000_000))
    for name in ("config.json", "manifest.json", "tokenizer.json"):
        (model / name).write_text("{}" * 1000)
    return model


def timed(act: Callable[[str, str], object], source: Path, target: Path) -> float:
    os.sync()
    start = time.perf_counter()
    act(str(source), str(target))
    return time.perf_counter() - start


async def exactly(lanes: list) -> list:
    """Just these, whatever the distance."""
    return lanes


def by_connector(
    kind: type[SSHConnector], bed: Testbed, site: Site, streams: int | None = None
) -> dict[str, Callable[[str, str], None]]:
    """push(source, target) and pull(source, target) through a StreamFlow connector, logins included."""

    def move(way: str, source: str, target: str) -> None:
        async def act() -> None:
            connector = kind("site", "/", nodes=[site.address], username=site.user, sshKey=str(bed.key))
            if streams is not None:
                connector.awake = lambda location: exactly(connector.lanes(location)[:streams])  # type: ignore[attr-defined]
            location = ExecutionLocation(name=site.address, deployment="site", hostname=site.address, local=False)
            try:
                if way == "push":
                    await connector.copy_local_to_remote(source, target, [location])
                else:
                    await connector.copy_remote_to_local(source, target, location)
            finally:
                await connector.undeploy(False)

        asyncio.run(act())

    return {way: lambda source, target, way=way: move(way, source, target) for way in ("push", "pull")}  # type: ignore[misc]


def by_tar(bed: Testbed, site: Site) -> dict[str, Callable[[str, str], None]]:
    ssh = f"ssh -F {bed.ssh_config} -c aes128-gcm@openssh.com {site.name}"

    def shell(line: str) -> None:
        subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True)

    return {
        "push": lambda source, target: shell(
            f"tar cf - -C {source} . | {ssh} 'mkdir {target} && tar xf - -C {target}'"
        ),
        "pull": lambda source, target: shell(
            f"mkdir {target} && {ssh} 'tar cf - -C {source} .' | tar xf - -C {target}"
        ),
    }


def by_rsync(bed: Testbed, site: Site) -> dict[str, Callable[[str, str], None]]:
    ssh = f"ssh -F {bed.ssh_config} -c aes128-gcm@openssh.com"

    def rsync(source: str, target: str) -> None:
        subprocess.run(["rsync", "-a", "-W", "-e", ssh, f"{source}/", target], check=True)

    return {
        "push": lambda source, target: rsync(source, f"{site.name}:{target}"),
        "pull": lambda source, target: rsync(f"{site.name}:{source}", target),
    }


def compare(bed: Testbed, site: Site, here: Path, model: Path, ways: dict, repeats: int) -> dict[str, dict[str, float]]:
    """Best MB/s of each way, push and pull, taking turns; every copy is compared with the original in size."""
    size = sum(path.stat().st_size for path in model.iterdir()) / 1e6
    result: dict[str, dict[str, float]] = {name: {"push": 0.0, "pull": 0.0} for name in ways}
    for _ in range(repeats):
        for name, act in ways.items():
            far, near = site.home / "copy", here / "copy"
            seconds = {"push": timed(act["push"], model, far), "pull": timed(act["pull"], far, near)}
            for path in model.iterdir():
                assert path.stat().st_size == (far / path.name).stat().st_size == (near / path.name).stat().st_size
            for way, value in seconds.items():
                result[name][way] = max(result[name][way], round(size / value, 1))
            shutil.rmtree(far)
            shutil.rmtree(near)
    return result


def speed(megabytes: int, repeats: int, streams: list[int]) -> dict:
    with testbed(["site-a"]) as (bed, here):
        site = bed.sites[0]
        model = checkpoint(here, megabytes)
        ways = {
            "tar | ssh": by_tar(bed, site),
            "rsync -W": by_rsync(bed, site),
            "StreamFlow": by_connector(SSHConnector, bed, site),
            "CrossFed": by_connector(ours.ParallelSSHConnector, bed, site),
        }
        for count in streams:
            ways[f"CrossFed, {count} connections"] = by_connector(ours.ParallelSSHConnector, bed, site, count)
        found = compare(bed, site, here, model, ways, repeats)
    base = found["tar | ssh"]
    return {
        "megabytes": megabytes,
        "MB/s": found,
        "ratio to tar | ssh": {
            name: {way: round(value / base[way], 2) for way, value in row.items()} for name, row in found.items()
        },
    }


def wan(megabytes: int, round_trip: float, streams: list[int]) -> dict:
    with testbed(["site-a"]) as (bed, here):
        site = bed.sites[0]
        model = checkpoint(here, megabytes)
        how = link.apply(site, link.Shape(round_trip_seconds=round_trip))
        measured = link.round_trip(site)
        ways: dict[str, dict] = {"tar | ssh": by_tar(bed, site), "StreamFlow": by_connector(SSHConnector, bed, site)}
        ways["CrossFed"] = by_connector(ours.ParallelSSHConnector, bed, site)
        for count in streams:
            ways[f"CrossFed, {count} connections"] = by_connector(ours.ParallelSSHConnector, bed, site, count)
        found = compare(bed, site, here, model, ways, 1)
    megabits = {name: {way: round(value * 8, 1) for way, value in row.items()} for name, row in found.items()}
    one = megabits["StreamFlow"]
    return {
        "megabytes": megabytes,
        "round_trip_seconds": round(measured, 4),
        "link": how,
        "Mbit/s": megabits,
        "ratio to StreamFlow's one stream": {
            name: {way: round(value / one[way], 2) for way, value in row.items()} for name, row in megabits.items()
        },
    }


def rounds(count: int, polling: int) -> dict:
    """Seconds between rounds, as the jobs themselves saw them, and what they went into, as StreamFlow's log tells."""
    from coordinator.testbed.rehearsal import prepare_sites
    from tests.testbed.federation import federate

    with testbed(["site-a", "site-b"]) as (bed, here):
        run = federate(
            bed,
            here / "federation",
            *prepare_sites(bed),
            name="bench",
            rounds=count,
            polling=polling,
            prelude="date +%s.%N >> ~/began; trap 'date +%s.%N >> ~/ended' EXIT",
        )
        code = run.run()
        assert code == 0, run.text()
        began, ended = (
            list(
                zip(
                    *([float(line) for line in (site.home / name).read_text().split()] for site in bed.sites),
                    strict=True,
                )
            )
            for name in ("began", "ended")
        )
    gaps = [min(after) - max(before) for before, after in zip(ended, began[1:], strict=False)]
    parts = [steps(run.log, number, max(ended[number])) for number in range(count - 1)]
    return {
        "rounds": count,
        "polling_seconds": polling,
        "seconds_between_rounds": [round(gap, 2) for gap in gaps],
        "of_these": parts,
        "beyond_polling_and_our_own_steps": [
            round(gap - part["noticing"] - part["receive"] - part["aggregate"], 2)
            for gap, part in zip(gaps, parts, strict=True)
        ],
    }


def steps(log: list[str], number: int, last_end: float) -> dict[str, float]:
    """Noticing the last job's end, the coordinator's own two steps, and the rest, in seconds."""
    stamp = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+) \w+\s+(.*)")
    found = [
        (datetime.strptime(m[1], "%Y-%m-%d %H:%M:%S.%f").timestamp(), m[2]) for line in log if (m := stamp.match(line))
    ]
    receive = max(
        when for when, text in found if re.search(rf"EXECUTING step /rounds/receive_\S+ \(job \S+/0\.{number}\)", text)
    )
    aggregate = next(when for when, text in found if f"/rounds/aggregate/0.{number})" in text)
    complete = next(when for when, text in found if f"round {number} is complete" in text)
    return {
        "noticing": round(max(0.0, receive - last_end), 2),
        "receive": round(aggregate - receive, 2),
        "aggregate": round(complete - aggregate, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "wan", "rounds"))
    parser.add_argument("--megabytes", type=int, help="size of the checkpoint (default 1000, wan 400)")
    parser.add_argument("--repeats", type=int, default=1, help="turns of `speed`, best taken (default 1)")
    parser.add_argument("--round-trip", type=float, default=0.1, help="seconds (default 0.1)")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[],
        help="also CrossFed with so many connections, instead of as many as it chooses",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `rounds` (default 3)")
    parser.add_argument("--polling", type=int, default=1, help="seconds between questions to the queue (default 1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the testbed is taken down
    if options.what == "speed":
        result = speed(options.megabytes or 1000, options.repeats, options.streams)
    elif options.what == "wan":
        result = wan(options.megabytes or 400, options.round_trip, options.streams)
    else:
        result = rounds(options.rounds, options.polling)
    print(json.dumps({"cores": os.cpu_count()} | result, indent=2))


if __name__ == "__main__":
    main()

"""Laws of how ranks meet: nobody outside the job takes a seat, and nothing listens beyond the job's own addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from facility.exchange.errors import ConfigurationError, TransientError
from facility.exchange.files.locks import take_lock
from facility.launching.rendezvous import DIRECTORY, SECRET
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.peers import Peers
from facility.training.processes import ranks, rendezvous, torchrun
from facility.training.processes.ranks import Ranks
from tests.ports import free_port

LIMIT = timedelta(seconds=20)
ROOT = Path(__file__).resolve().parents[2]

RANK = """
import os, socket, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from facility.training.processes.exchange import all_gather_json
from facility.training.processes.ranks import from_environment
from facility.training.processes.rendezvous import further_store, join_ranks
from datetime import timedelta
ranks = from_environment("cpu")
join_ranks(ranks, threads=1, timeout_seconds=200)
store = further_store("more", ranks, timedelta(seconds=20))
store.set(f"here/{ranks.rank}", "yes"); store.wait([f"here/{other}" for other in range(ranks.world)])
shared = Path(sys.argv[1])
(shared / f"port-{ranks.rank}").write_text(os.environ["MASTER_PORT"] + " " + os.environ["CROSSFED_RENDEZVOUS"])
while not (shared / "go").exists():
    time.sleep(0.05)
total = torch.ones(1); dist.all_reduce(total)
(shared / f"sum-{ranks.rank}").write_text(f"{int(total)} {all_gather_json(ranks.rank)}")
dist.barrier(); os._exit(0)
"""


def ranks_of(rank: int, world: int = 2, *, one_node: bool = True) -> Ranks:
    return Ranks(
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        device=torch.device("cpu"),
        number=rank,
        one_node=one_node,
        hosts=rank == 0,
    )


def listeners(pids: set[int]) -> set[str]:
    """Addresses (hexadecimal, as the kernel shows them) on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/net/{file}").readlines()[1:]]
    return {fields[1].split(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes}


def children(pid: int) -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return {int(word) for word in found.split()}


def wait_until_met(job: subprocess.Popen[str], directory: Path) -> None:
    """Until both ranks have written where they met."""
    deadline = time.monotonic() + 200
    while len(list(directory.glob("port-*"))) < 2 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.poll() is None, job.communicate()[0]


def test_a_job_on_one_node_has_no_seat_for_a_stranger(tmp_path: Path):
    """While both ranks have met, a process that knows the port tries to be rank 1; the job ends as if alone."""
    command = [sys.executable, "-m", "facility.launch", "--cpu", "--ranks", "2", "--shared", str(tmp_path)]
    job = subprocess.Popen(
        [*command, "--", "-c", RANK, str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until_met(job, tmp_path)
        port, directory = (tmp_path / "port-0").read_text().split()
        assert Path(directory).stat().st_mode & 0o777 == 0o700
        assert listeners(children(job.pid)) <= {"0100007F"}, "gloo listens on loopback alone"
        with pytest.raises((dist.DistError, OSError)):
            rendezvous.join("127.0.0.1", int(port), timedelta(seconds=1))
        (tmp_path / "go").touch()
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2 [0, 1]"] * 2
    assert not Path(directory).exists()


@pytest.mark.slow
def test_torchrun_on_one_node_has_no_seat_for_a_stranger_either(tmp_path: Path):
    """Its own store still listens; nothing that a stranger writes there reaches the ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "rank.py").write_text(RANK)
    job = subprocess.Popen(
        [*launcher, str(tmp_path / "rank.py"), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until_met(job, tmp_path)
        told = [(tmp_path / f"port-{rank}").read_text().split() for rank in range(2)]
        assert told[0] == told[1] and Path(told[0][1]).stat().st_mode & 0o777 == 0o700
        assert listeners(children(job.pid)) <= {"0100007F"}, "gloo listens on loopback alone"
        stranger = dist.TCPStore("127.0.0.1", int(told[0][0]), None, False, timedelta(seconds=5))
        for name in ("default_pg/0//cpu//0/1", "default_pg/0//cpu//1/0", "store_based_barrier_key/0"):
            stranger.set(name, "stranger")
        (tmp_path / "go").touch()
        output, _ = job.communicate(timeout=200)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2 [0, 1]"] * 2


def test_a_start_under_torchrun_removes_what_earlier_ones_left_and_nothing_that_a_rank_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ages = {"left": 100.0, "used": 100.0, "begun": 1.0}
    places = {name: tmp_path / f"{torchrun.PREFIX}{number}-7-0" for number, name in enumerate(ages)}
    for name, place in places.items():
        place.mkdir(mode=0o700)
        (place / "ranks").touch()
        (place / torchrun.ALIVE).touch()
        os.utime(place / torchrun.ALIVE, (time.time() - ages[name],) * 2)
    with open(places["used"] / torchrun.ALIVE) as held:
        assert take_lock(held, places["used"], wait=False)
        own = torchrun.agents_directory()
        assert {*tmp_path.iterdir()} == {own, places["used"], places["begun"]}
    os.utime(own / torchrun.ALIVE, (time.time() - 100.0,) * 2)
    assert torchrun.agents_directory() == own, "another rank of the start"
    assert {*tmp_path.iterdir()} == {own, places["begun"]}, "a rank holds its own directory to its end"


def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> dict[int, dist.Store]:
    """The stores of two ranks with one secret, on two nodes, once they have met at this port."""
    directory = tmp_path / "private"
    directory.mkdir(mode=0o700)
    (directory / SECRET).write_bytes(b"s" * 32)
    monkeypatch.setenv(DIRECTORY, str(directory))
    met: dict[int, dist.Store] = {}
    server = rendezvous.serve("127.0.0.1", port, ranks_of(0), LIMIT)
    stranger = rendezvous.join("127.0.0.1", port, LIMIT)
    for name in ("rank/1", "default_pg/0//cpu//0/1", "store ranks/rank/1"):
        stranger.set(name, "stranger")
    other = threading.Thread(target=lambda: met.update({0: rendezvous.admitted("ranks", server, ranks_of(0))}))
    other.start()
    joined = rendezvous.join("127.0.0.1", port, LIMIT)
    met[1] = rendezvous.admitted("ranks", joined, ranks_of(1))
    other.join(20)
    return met


def test_several_launchers_admit_only_ranks_that_know_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stranger at the store writes every name it can guess before rank 1 comes, and changes nothing."""
    port = free_port()
    met = meet(tmp_path, monkeypatch, port)
    met[1].set("hello", "from 1")
    assert met[0].get("hello") == b"from 1"
    with pytest.raises(dist.DistError):
        rendezvous.join("127.0.0.1", port, LIMIT).wait(["hello"], timedelta(seconds=0.2))


def test_a_stranger_that_lists_the_store_learns_and_forges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever knows the port is told every key there is: with the token in one, it would speak as a rank."""
    port = free_port()
    met = meet(tmp_path, monkeypatch, port)
    said = {"scheduler": "10.0.0.1 4000 token", "sync/peer/1/0": "10.0.0.2 4001 token"}
    for name, value in said.items():
        met[0].set(name, value)
    stranger = rendezvous.join("127.0.0.1", port, LIMIT)
    seen = {key: stranger.get(key) for key in stranger.list_keys()}
    assert len(seen) >= len(said)
    for name, value in seen.items():
        assert not any(word in name for word in ("scheduler", "peer")) and b"token" not in value
        other = next((one for key, one in seen.items() if key != name and one != value), b"x")
        stranger.set(name, other)  # an entry of the ranks' own, in another's place
    for name in said:
        with pytest.raises(TransientError, match="another process has put something in place of"):
            met[1].get(name)


def test_a_sealed_store_answers_as_the_store_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """To ranks: all that torch and the replicas ask of one, also through a prefix and a further connection."""
    met = meet(tmp_path, monkeypatch, free_port())
    plain = rendezvous.serve("127.0.0.1", 0, ranks_of(0), LIMIT)

    def told(one: dist.Store, other: dist.Store) -> list[object]:
        first, second = dist.PrefixStore("a", one), dist.PrefixStore("a", other).clone()
        first.set("text", "ü")
        first.set("empty", "")
        assert first.get("empty") == b""  # nothing answers a set: another connection may be served before it
        swaps = [second.compare_set("text", expected, "new") for expected in ("x", "ü")]
        swaps += [second.compare_set("unset", expected, "new") for expected in ("", "x", "new")]
        second.wait(["text", "unset"], timedelta(seconds=5))
        with pytest.raises(dist.DistStoreError):
            second.wait(["never"], timedelta(milliseconds=10))
        counts = [first.add("count", 2), second.add("count", 3), second.check(["text"]), second.check(["text", "no"])]
        values = [first.get(name) for name in ("text", "empty", "unset")]
        return [*swaps, *counts, *values, first.delete_key("text"), second.check(["text"])]

    assert told(met[0], met[1]) == told(plain, plain.clone())


def test_a_rank_with_another_secret_is_refused():
    store = dist.HashStore()
    store.set("challenge/1", "c")
    store.set("rank/1", rendezvous.proof(b"another", "rank 1 of 2"))
    with pytest.raises(TransientError, match="rank 1 does not know the job's secret"):
        rendezvous.admit(store, b"s" * 32, rank=0, world=2)


def test_what_a_rank_proved_once_admits_nobody_again():
    """A stranger that saw a whole meeting says the same in the next one, of the same job and secret."""
    first, again, secret = dist.HashStore(), dist.HashStore(), b"s" * 32
    other = threading.Thread(target=lambda: rendezvous.admit(first, secret, rank=1, world=2))
    other.start()
    rendezvous.admit(first, secret, rank=0, world=2)
    other.join(20)
    for name in ("challenge/1", "rank/1"):
        again.set(name, first.get(name))
    with pytest.raises(TransientError, match="rank 1 does not know the job's secret"):
        rendezvous.admit(again, secret, rank=0, world=2)


def test_a_store_listens_on_the_address_of_the_job_alone():
    store = rendezvous.serve("127.0.0.1", 0, ranks_of(0), LIMIT)
    assert "0100007F" in listeners({os.getpid()})
    with open("/proc/net/tcp6") as file:
        assert f":{store.port:04X}" not in {line.split()[1][-5:] for line in file.readlines()[1:] if " 0A " in line}
    assert rendezvous.address_of(socket.gethostname(), one_node=True) == "127.0.0.1"
    assert rendezvous.address_of("localhost", one_node=False) == "", "another node cannot reach a loopback address"
    assert rendezvous.interface_of("127.0.0.1") == "lo" and rendezvous.interface_of("203.0.113.9") == ""


def test_a_node_whose_own_name_means_loopback_is_reached_on_its_way_out(monkeypatch: pytest.MonkeyPatch):
    """As Debian's /etc/hosts has it; where the first node's address is loopback itself, all nodes are one machine."""
    ways = {"node1": "127.0.0.1", "127.0.0.1": "127.0.0.1", rendezvous.OUTSIDE[0]: "198.51.100.7"}
    monkeypatch.setattr(rendezvous, "source_address", lambda host: ways.get(host, ""))
    interfaces = {"127.0.0.1": "lo", "198.51.100.7": "eth3"}
    monkeypatch.setattr(rendezvous, "interface_of", lambda address: interfaces.get(address, ""))
    several = ranks_of(0, one_node=False)
    for name, address, interface in (("node1", "198.51.100.7", "eth3"), ("127.0.0.1", "127.0.0.1", "lo")):
        monkeypatch.setenv("MASTER_ADDR", name)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
        rendezvous.listen_locally(one_node=False)
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == interface
        assert rendezvous.own_address() == rendezvous.address_of_replicas(several) == address
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert rendezvous.address_of_replicas(ranks_of(0)) == "127.0.0.1", "on one node nothing listens to others"
    del ways[rendezvous.OUTSIDE[0]]
    assert rendezvous.own_address() == "node1", "without a way out its name is all that is known"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_nodes_that_have_ipv6_alone_meet(monkeypatch: pytest.MonkeyPatch):
    """Their names have no IPv4 address: the store, the interface and the replicas' own connections are of IPv6."""
    monkeypatch.setattr(rendezvous, "address_of", lambda host, one_node: host)
    store = rendezvous.serve("::1", 0, ranks_of(0), LIMIT)
    rendezvous.join("::1", store.port, LIMIT).set("hello", "from 1")
    assert store.get("hello") == b"from 1"
    assert rendezvous.source_address("::1") == "::1" and rendezvous.interface_of("::1") == "lo"
    assert rendezvous.interface_of("2001:db8::9") == ""
    places = [ReplicaRank(replica=replica, replicas=2) for replica in range(2)]
    peers = [Peers(store, place, "::1", 20, lambda kind, vector: vector * kind) for place in places]
    try:
        assert peers[0].call(1, 3, torch.ones(2)).tolist() == [3.0, 3.0]
    finally:
        for one in peers:
            one.close()


def test_a_store_is_served_in_the_family_of_the_nodes_name(monkeypatch: pytest.MonkeyPatch):
    """IPv4 where a node has both; all interfaces of both where its name means loopback to itself."""
    known = {"both": ["2001:db8::7", "198.51.100.7"], "six": ["2001:db8::7"], "debian": ["127.0.1.1"], "nobody": []}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [row_of(one) for one in known[host]])
    found = {host: rendezvous.address_of(host, one_node=False) for host in known}
    assert found == {"both": "198.51.100.7", "six": "2001:db8::7", "debian": "", "nobody": ""}
    monkeypatch.undo()
    store = rendezvous.serve("localhost", 0, ranks_of(0, one_node=False), LIMIT)
    for here in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
        socket.create_connection((here, store.port), timeout=5).close()


def row_of(address: str) -> tuple:
    """One of `socket.getaddrinfo`'s rows."""
    return (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "open"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        rendezvous.private_directory()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        rendezvous.private_directory()


def test_a_rank_that_is_interrupted_says_so_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C on `facility.measure` showed the same traceback twice: the rank's, and what the launcher repeats of it."""

    def interrupted() -> int:
        raise KeyboardInterrupt

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as stop:
        ranks.run_and_exit(interrupted)
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_a_process_where_others_meet_is_one_that_none_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one launcher meet at a file, which outlives each of them; a plan may number them anew."""
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(DIRECTORY, str(directory))
    seats = {"named": (1, True), "first": (0, False), "other": (1, False)}
    everyone = {
        name: Ranks(rank=rank, world=3, local_rank=0, local_world=1, device=torch.device("cpu"), hosts=hosts)
        for name, (rank, hosts) in seats.items()
    }
    assert not any(map(rendezvous.serves_others, everyone.values()))
    (directory / SECRET).write_bytes(b"x" * 32)  # of several launchers
    assert [name for name, one in everyone.items() if rendezvous.serves_others(one)] == ["named", "first"]

"""Where the ranks of one facility meet: a store that no process outside the job can use.

torch's TCPStore listens on every interface without authentication, so any process that knew the port could take a
rank's place. Here

- on one node, where the launcher made a private directory, the store is a file in it (`FileStore`, directory mode 0700)
  and gloo listens on the loopback interface only;
- otherwise a TCPStore listens on the job's own address alone, every rank proves that it knows the job's secret before
  the first process group is made, and what ranks leave there is sealed under it (`sealed_store.py`);
- torchrun's own store, which admits whoever knows its port, is never used (`torchrun.py`): on one node the ranks meet
  in a directory of their own; on several at a store of the first rank, by a secret in a directory that the user names.

`CROSSFED_RENDEZVOUS` names the launcher's directory; the secret is the file `secret` in it, mode 0600.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from facility.exchange.addresses import LOOPBACK
from facility.exchange.errors import ConfigurationError, TransientError
from facility.launching.rendezvous import DIRECTORY, SECRET
from facility.training.devices import check_own_gpus, gpu_of
from facility.training.processes.exchange import all_gather_json, broadcast_json
from facility.training.processes.ranks import Ranks
from facility.training.processes.sealed_store import SealedStore
from facility.training.processes.torchrun import (
    agents_directory,
    announce_store,
    find_store,
    under_torchrun,
    without_directory,
)

SIOCGIFADDR = 0x8915
CHALLENGE_BYTES = 16
OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Of TEST-NET-1 (RFC 5737) and of the IPv6 documentation prefix (RFC 3849), nobody's: the way to them is the way
out."""
INTERFACES = Path("/proc/net/if_inet6")
"""Each IPv6 address of this node in hexadecimal, and as the sixth word its interface (proc_net(5))."""


def join_ranks(ranks: Ranks, *, threads: int, timeout_seconds: float) -> None:
    """Set the process's device and threads, and join the other ranks. A hung peer is noticed after the timeout."""
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", max(1, cores // ranks.local_world))))
    if ranks.world == 1 or dist.is_initialized():
        return
    limit = timedelta(seconds=timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
    listen_locally(one_node=ranks.one_node)
    store = first_store(ranks, limit)
    try:
        dist.init_process_group(backend, store=store, timeout=limit, rank=ranks.rank, world_size=ranks.world)
    except dist.DistError as error:
        raise TransientError(f"rank {ranks.rank} of {ranks.world} could not join the others: {error}") from None
    if ranks.device.type == "cuda":
        check_own_gpus(all_gather_json(gpu_of(ranks.device)))


def first_store(ranks: Ranks, limit: timedelta) -> dist.Store:
    """The store where ranks make their first process group. Raises `TransientError` where the others do not come."""
    if under_torchrun() and ranks.one_node:
        os.environ.setdefault(DIRECTORY, str(agents_directory()))
    try:
        if under_torchrun() and not ranks.one_node:
            return admitted("ranks", store_beside_torchrun(ranks, limit), ranks)
        if (store := file_store("ranks", ranks)) is not None:
            return store
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # A plan may number ranks anew; the store stays with the process that MASTER_ADDR names.
        found = serve(address, port, ranks, limit) if ranks.hosts else join(address, port, limit)
        return admitted("ranks", found, ranks)
    except (dist.DistError, OSError) as error:
        raise TransientError(f"rank {ranks.rank} of {ranks.world} could not join the others: {error}") from None


def store_beside_torchrun(ranks: Ranks, limit: timedelta) -> dist.TCPStore:
    """The first rank's store, which it announces in the directory that the user made for this start."""
    directory = private_directory()
    if directory is None:
        raise without_directory()
    if not ranks.hosts:
        return join(*find_store(directory, limit.total_seconds()), limit)
    address = own_address()
    store = serve(address, 0, ranks, limit)
    announce_store(directory, address, store.port)
    return store


def further_store(name: str, ranks: Ranks, limit: timedelta) -> dist.Store:
    """Another store of all ranks, served by the first; needs the process group and a `name` never used before."""
    if (private := file_store(name, ranks)) is not None:
        return private
    if ranks.first:
        address = own_address()
        store = serve(address, 0, ranks, limit)
        broadcast_json([address, store.port])
    else:
        address, port = broadcast_json(None)
        store = join(str(address), int(port), limit)
    return admitted(name, store, ranks)


def file_store(name: str, ranks: Ranks) -> dist.FileStore | None:
    """A file in the launcher's directory on this node; None where ranks have several launchers or none."""
    directory = own_directory()
    return None if directory is None else dist.FileStore(str(directory / name), ranks.world)


def own_directory() -> Path | None:
    """The launcher's directory on this node; None where ranks have several launchers or none."""
    directory = private_directory()
    return None if directory is None or read_secret(directory) else directory


def serves_others(ranks: Ranks) -> bool:
    """True if this process holds a store where the ranks meet; without it they form no group any more."""
    return (ranks.hosts or ranks.first) and own_directory() is None


def serve(address: str, port: int, ranks: Ranks, limit: timedelta) -> dist.TCPStore:
    """A TCPStore that listens on this node's address alone; port 0: any free one."""
    here = address_of(address, one_node=ranks.one_node)
    both = not here and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in here else socket.AF_INET
    listener = socket.create_server((here, port), family=family, backlog=4096, dualstack_ipv6=both)
    bound = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        bound,
        None,
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )


def join(address: str, port: int, limit: timedelta) -> dist.TCPStore:
    """The TCPStore that another rank serves."""
    return dist.TCPStore(address, port, None, is_master=False, wait_for_workers=False, timeout=limit)


def address_of(host: str, *, one_node: bool) -> str:
    """What to listen on to be reached as `host`: its address here, IPv4 where it has one.

    All interfaces where several nodes know this one by a name that means loopback here, as Debian's /etc/hosts does.
    """
    if one_node:
        return "127.0.0.1"
    found = next((address for _, address in addresses(host)), "")
    return "" if not found or ip_address(found).is_loopback else found


def addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses of a host with their families, IPv4 first; none where its name is unknown."""
    try:
        found = [(one[0], str(one[4][0])) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []
    return sorted(found, key=lambda one: one[0] != socket.AF_INET)


def admitted(name: str, store: dist.Store, ranks: Ranks) -> dist.Store:
    """What of the store only ranks can read and set that know the job's secret, once each has proved it."""
    secret = read_secret(private_directory())
    if not secret:
        return store
    met = admit(dist.PrefixStore(proof(secret, f"store {name}"), store), secret, rank=ranks.rank, world=ranks.world)
    return SealedStore(store, bytes.fromhex(proof(secret, f"entries of store {name} {met}")))


def admit(store: dist.Store, secret: bytes, *, rank: int, world: int) -> str:
    """Prove to all ranks that this one knows the secret, and wait for every other's proof. Raises `TransientError`.

    Every rank names a random challenge, and a proof covers all of them: one that was seen before proves nothing.
    Returns what was proved, which is never the same again.
    """
    own = secrets.token_hex(CHALLENGE_BYTES)
    store.set(f"challenge/{rank}", own)
    challenges = [store.get(f"challenge/{other}").decode(errors="replace") for other in range(world)]
    if challenges[rank] != own:
        raise TransientError(f"another process answers for rank {rank} at the job's store")
    asked = f"of {world}: {' '.join(challenges)}"
    store.set(f"rank/{rank}", proof(secret, f"rank {rank} {asked}"))
    for other in range(world):
        shown = store.get(f"rank/{other}").decode(errors="replace")
        if not hmac.compare_digest(shown, proof(secret, f"rank {other} {asked}")):
            raise TransientError(f"rank {other} does not know the job's secret: it is not a process of this job")
    return asked


def proof(secret: bytes, text: str) -> str:
    """HMAC-SHA256 of the text under the job's secret, in hexadecimal."""
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def private_directory() -> Path | None:
    """The launcher's directory. Raises `ConfigurationError` where others than this user may enter it."""
    if not (name := os.environ.get(DIRECTORY)):
        return None
    directory = Path(name)
    try:
        found = directory.lstat()
    except OSError as error:
        raise ConfigurationError(f"{DIRECTORY} names {directory}, which cannot be read: {error}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"{DIRECTORY} names {directory}, expected a directory of this user with mode 0700: "
            "remove it and start again"
        )
    return directory


def read_secret(directory: Path | None) -> bytes:
    """The job's secret; empty where ranks were started without the launcher."""
    file = directory / SECRET if directory is not None else None
    return file.read_bytes() if file is not None and file.is_file() else b""


def listen_locally(*, one_node: bool) -> None:
    """Bind gloo (and NCCL's bootstrap) to loopback on one node, else to the interface that reaches the first node.

    What the environment sets stays.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    name = "lo" if one_node else interface_of(address_towards(address))
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def own_address() -> str:
    """By what the other nodes reach this one: its address on the way to the first node, or the first node's name."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    found = address_towards(first)
    return found if found and not ip_address(found).is_loopback else first


def address_towards(host: str) -> str:
    """The address of this node by which `host` is reached; empty where it is unknown.

    Where `host` is a name that means loopback here, as Debian's /etc/hosts has it for a node's own: the address on the
    way out.
    """
    found = source_address(host)
    if host not in LOOPBACK and found and ip_address(found).is_loopback:
        return next(filter(None, map(source_address, OUTSIDE)), found)
    return found


def source_address(host: str) -> str:
    """The address from which a packet to `host` is sent; empty where no way is known."""
    for family, address in addresses(host):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # no packet is sent: only the route is looked up
                return str(probe.getsockname()[0])
        except OSError:  # no way there in this family
            continue
    return ""


def address_of_replicas(ranks: Ranks) -> str:
    """On which this rank listens for those of other replicas, as numbers."""
    here = "127.0.0.1"
    return here if ranks.one_node else address_towards(os.environ.get("MASTER_ADDR", here)) or here


def interface_of(address: str) -> str:
    """Name of the network interface that has this address; empty where none has."""
    if not address:
        return ""
    if ":" in address:
        wanted = ip_address(address).packed.hex()
        rows = (
            [line.split() for line in INTERFACES.read_text(encoding="utf-8").splitlines()]
            if INTERFACES.exists()
            else []
        )
        return next((row[5] for row in rows if row[:1] == [wanted]), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""

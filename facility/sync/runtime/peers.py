"""Parameters from rank to rank without a process group: a peer answers while it computes.

A thread on every rank accepts authenticated connections and answers with a vector for a vector. Used where one side
must not wait for the other (gossip) and where one side serves many (waves).
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from facility.exchange.errors import first_line
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.process_groups import ExchangeFailed

log = logging.getLogger("facility.sync")
HEADER = struct.Struct("<QQ")
"""What is asked for (the policy says what it means), number of float32 elements."""
TOKEN_BYTES = 32

Answer = Callable[[int, torch.Tensor], torch.Tensor]
"""(kind, vector received) -> vector to send back; called in a thread of its own."""


class Peers:
    """This rank's listener and its connections to the same position of other replicas."""

    def __init__(
        self, store: dist.Store, place: ReplicaRank, address: str, timeout_seconds: float, answer: Answer
    ) -> None:
        self.store, self.place, self.timeout_seconds, self.answer = store, place, timeout_seconds, answer
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._closing = False
        self._accepted: list[socket.socket] = []
        self._open: dict[int, socket.socket] = {}
        port = self._listener.getsockname()[1]
        store.set(self._name(place.replica), f"{address} {port} {self._token}")
        threading.Thread(target=self._accept, name="sync-peers", daemon=True).start()

    def call(self, replica: int, kind: int, vector: torch.Tensor) -> torch.Tensor:
        """Send a float32 vector on the CPU to a peer and return its answer. Raises `ExchangeFailed`."""
        try:
            connection = self._open.get(replica) or self._connect(replica)
            send(connection, kind, vector)
            _, answer = receive(connection)
            return answer
        except (OSError, ValueError, dist.DistError) as error:
            old = self._open.pop(replica, None)
            if old is not None:
                old.close()
            raise ExchangeFailed(f"peer {replica}: {first_line(error)}") from None

    def close(self) -> None:
        self._closing = True
        for connection in [self._listener, *self._open.values(), *self._accepted]:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            connection.close()

    def _name(self, replica: int) -> str:
        return f"peer/{replica}/{self.place.position}"

    def _connect(self, replica: int) -> socket.socket:
        host, port, token = self.store.get(self._name(replica)).decode().split(" ")
        connection = socket.create_connection((host, int(port)), timeout=self.timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token.encode())
        self._open[replica] = connection
        return connection

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._accepted.append(connection)
            threading.Thread(target=self._serve, args=(connection,), name="sync-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self.timeout_seconds)
            shown = bytearray(TOKEN_BYTES)
            fill(connection, memoryview(shown))
            if not hmac.compare_digest(bytes(shown), self._token.encode()):
                log.warning("a peer without the token was refused")
                return
            connection.settimeout(None)
            while not self._closing:
                kind, vector = receive(connection)
                send(connection, kind, self.answer(kind, vector))
        except (OSError, ValueError):
            pass
        finally:
            connection.close()


def send(connection: socket.socket, kind: int, vector: torch.Tensor) -> None:
    """Send one float32 vector on the CPU. Raises `OSError` when the other side is gone."""
    connection.sendall(HEADER.pack(kind, vector.numel()))
    if vector.numel():
        connection.sendall(vector.numpy().data.cast("B"))


def receive(connection: socket.socket) -> tuple[int, torch.Tensor]:
    """Raises `OSError` when the other side is gone and `ValueError` for a length that cannot be."""
    header = bytearray(HEADER.size)
    fill(connection, memoryview(header))
    kind, elements = HEADER.unpack(header)
    if elements > 1 << 40:
        raise ValueError(f"a vector of {elements} elements")
    vector = torch.empty(elements, dtype=torch.float32)
    if elements:
        fill(connection, vector.numpy().data.cast("B"))
    return kind, vector


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer from a connection. Raises `ConnectionError` when the other side closes it before."""
    while len(buffer):
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("closed by the other side")
        buffer = buffer[count:]

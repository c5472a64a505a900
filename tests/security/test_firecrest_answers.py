"""A FirecREST that is broken or hostile: what it answers costs its facility the round, and nobody memory or time."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import socket
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("firecrest")

import httpcore
from streamflow.core.exception import WorkflowExecutionException

from coordinator.streamflow_plugin import bounded_http, firecrest_files
from coordinator.streamflow_plugin.firecrest_client import Rejected
from tests.cases import slow_but
from tests.engine.engines import streamflow
from tests.security.attacked import HONEST, attacked_federation, rows_of
from tests.streamflow_plugin.firecrest_server import SECRET, SYSTEM, FirecrestServer, Job, Site
from tests.streamflow_plugin.test_firecrest import PLACE, access, act, command, server  # noqa: F401 (a fixture)

MOST = 80 << 20
"""Bytes of memory that no answer may take."""


def put(handler: Any, block: bytes) -> None:
    handler.wfile.write(block)
    handler.server.RequestHandlerClass.site.sent += len(block)


def head(handler: Any, *lines: str) -> None:
    put(handler, "\r\n".join(["HTTP/1.1 200 OK", "f7t-appversion: 2.6.0", *lines, "", ""]).encode())


def body(content: bytes, *lines: str) -> Callable[[Any], None]:
    def attack(handler: Any) -> None:
        head(handler, f"Content-Length: {len(content)}", *lines)
        put(handler, content)

    return attack


@functools.cache
def _quarter_of_a_gibibyte() -> bytes:
    squeezed, block = zlib.compressobj(level=1, wbits=31), bytes(1 << 20)  # 31: as gzip
    return b"".join(squeezed.compress(block) for _ in range(256)) + squeezed.flush()


def compressed(handler: Any) -> None:
    body(_quarter_of_a_gibibyte(), "Content-Encoding: gzip")(handler)


def endless(handler: Any) -> None:
    head(handler, "Transfer-Encoding: chunked")
    block = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    while handler.server.RequestHandlerClass.site.sent < 1 << 30:
        put(handler, block)


def dripping(handler: Any) -> None:
    head(handler, "Content-Length: 1000000")
    while True:
        put(handler, b" ")
        time.sleep(0.1)


def dripping_head(handler: Any) -> None:
    put(handler, b"HTTP/1.1 200 OK\r\n")
    while True:
        put(handler, b"x: y\r\n")
        time.sleep(0.1)


def silent(handler: Any) -> None:
    head(handler, f"Content-Length: {10**18}")
    time.sleep(5)


OUT_OF_BOUNDS: dict[str, Callable[[Any], None]] = {
    "endless": endless,
    "compressed": compressed,
    "too large": body(b" " * (5 << 20)),
    "deep": body(b'{"output":' + b"[" * 100_000),
    "many": body(b'{"output":[' + b"{}," * 1_000_000 + b"{}]}"),
    "digits": body(b'{"output":{"mode":' + b"9" * 5000 + b',"size":1}}'),
    "infinite": body(b'{"output":{"mode":1e999,"size":1e999}}'),
    "not a number": body(b'{"output":{"mode":NaN,"size":NaN}}'),
    "not UTF-8": body(b'{"output":"\xff\xfe"}'),
    "lone surrogates": body(b'{"output":{"mode":"\\ud800","size":"\\ud800"}}'),
    "twice": body(b'{"output":{"mode":1},"output":{"mode":2}}'),
}
SENSELESS: dict[str, Any] = {
    "a list": [],
    "null": None,
    "text": "x",
    "no output": {},
    "null inside": {"output": None},
    "text inside": {"output": "x"},
    "mappings": {"output": {"mode": {}, "size": {}}},
    "text for numbers": {"output": {"mode": "x", "size": "x"}},
    "a long message": {"message": "m" * 60_000},
}
ATTACKS = OUT_OF_BOUNDS | {name: body(json.dumps(one).encode()) for name, one in SENSELESS.items()}
SLOW = {"dripping": dripping, "dripping head": dripping_head, "silent": silent}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http.Patience, "seconds", 1.0)


def attacked(server: Site, tmp_path: Path, step: Callable[[Any], Any]) -> WorkflowExecutionException:  # noqa: F811
    """The error of a step, which takes little memory and ends: what drips would take a day."""
    tracemalloc.start()
    try:
        with pytest.raises(WorkflowExecutionException) as caught:
            act(server, tmp_path, step, retries=2)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert server.sent < 32 << 20, "no more is taken than may be"
    return caught.value


@pytest.mark.parametrize("name", slow_but([*OUT_OF_BOUNDS, "null inside", "a long message"], ATTACKS))
def test_an_answer_out_of_bounds_is_rejected_at_once(server: Site, tmp_path: Path, name: str):  # noqa: F811
    server.attacks["ops/stat"] = ATTACKS[name]
    error = attacked(server, tmp_path, command(f"test -d {tmp_path}"))
    assert isinstance(error, Rejected) and len(str(error)) < 500, error
    assert server.attacked == 1, "it is not asked for again"
    again = act(server, tmp_path, command(f"mkdir -p {tmp_path}/made"))
    assert again == [("", 0)], "other answers are taken as before"


@pytest.mark.parametrize("name", slow_but(["dripping"], SLOW))
def test_an_answer_that_never_ends_is_given_up(server: Site, tmp_path: Path, hasty: None, name: str):  # noqa: F811
    server.attacks["ops/stat"] = SLOW[name]
    error = attacked(server, tmp_path, command(f"test -d {tmp_path}"))
    assert "firecrest does not answer, tried 2 times" in str(error)


@pytest.mark.parametrize(
    "name", slow_but(["endless", "deep", "a list", "dripping"], [*OUT_OF_BOUNDS, *SENSELESS, *SLOW])
)
def test_a_token_endpoint_is_held_to_the_same(server: Site, tmp_path: Path, hasty: None, name: str):  # noqa: F811
    server.attacks["/token"] = (ATTACKS | SLOW)[name]
    attacked(server, tmp_path, command(f"test -d {tmp_path}"))


@pytest.mark.parametrize("token", ["a\r\nX-Evil: 1", "", "ü", 7, "t" * 70_000])
def test_no_token_is_a_header_of_its_own(server: Site, tmp_path: Path, token: Any):  # noqa: F811
    server.attacks["/token"] = body(json.dumps({"access_token": token, "expires_in": 300}).encode())
    assert isinstance(attacked(server, tmp_path, command(f"test -d {tmp_path}")), Rejected)


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_no_proxy_reads_what_goes_to_this_machine(
    server: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    """It is not encrypted: the client's secret, its tokens and the files went to whoever the environment names."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "weights").write_bytes(content := os.urandom(20_000_000))  # over the staging area
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setattr(bounded_http.Patience, "seconds", 10.0)
        act(server, tmp_path, lambda one: one.copy_remote_to_local(str(tmp_path / "there"), str(tmp_path / "b"), PLACE))
        with pytest.raises(BlockingIOError):
            proxy.accept()
    assert (tmp_path / "b" / "weights").read_bytes() == content


@pytest.mark.parametrize("name", slow_but(["endless", "too large"], ["endless", "compressed", "dripping", "too large"]))
@pytest.mark.parametrize("size", [1000, 20_000_000], ids=["small", "staged"])
def test_a_download_takes_no_more_and_no_longer_than_was_listed(
    server: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    size: int,
):
    """Small files directly and large ones over the staging area, whose address the facility names."""
    monkeypatch.setattr(bounded_http, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(bounded_http.Patience, "seconds", 1.0)
    monkeypatch.setattr(bounded_http, "SLOWEST", 20_000_000)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "weights").write_bytes(os.urandom(size))
    server.attacks["ops/download" if size == 1000 else "/staging/"] = (ATTACKS | SLOW)[name]
    error = attacked(
        server, tmp_path, lambda one: one.copy_remote_to_local(str(tmp_path / "there"), str(tmp_path / "back"), PLACE)
    )
    assert "FAILED copy" in str(error) or "does not answer" in str(error)
    assert not (tmp_path / "back" / "weights").exists() and not list(tmp_path.glob("back/*.part"))


def test_a_file_that_grew_to_no_end_is_not_fetched_for_its_checksum(server: Site, tmp_path: Path):  # noqa: F811
    """The engine compares the settings that it sent, in memory."""
    with open(tmp_path / "settings.json", "wb") as file:
        file.truncate(100 << 20)
    checksum = f"test -f {tmp_path}/settings.json && sha1sum {tmp_path}/settings.json | awk '{{print $1}}'"
    assert "bytes, at most" in str(attacked(server, tmp_path, command(checksum)))
    assert not any("download" in one for one in server.requests)


def pushed(server: Site, tmp_path: Path) -> Path:  # noqa: F811
    """Where a model that goes over the staging area lies there, if it has arrived."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(os.urandom(1_500_000))
    (tmp_path / "site").mkdir()
    there = tmp_path / "site" / "model"
    tracemalloc.start()
    try:
        with suppress(WorkflowExecutionException):
            act(server, tmp_path, lambda one: one.copy_local_to_remote(str(tmp_path / "model"), str(there), [PLACE]))
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert server.sent < 32 << 20, "no more is taken than may be"
    return there / "weights"


@pytest.mark.parametrize("name", ["endless", "compressed", "dripping", "too large"])
def test_what_a_staging_area_answers_to_an_upload_is_bounded(
    server: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
):
    monkeypatch.setattr(bounded_http, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(bounded_http, "SLOWEST", 20_000_000)
    server.attacks["/staging/"] = (ATTACKS | SLOW)[name]
    assert not pushed(server, tmp_path).exists()


class Taking(httpcore.NetworkStream):
    """A server that takes each block of a request in so many seconds of a clock of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        assert len(buffer) <= bounded_http.BLOCK
        self.now += self.seconds

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return b""


AS_SLOW_AS_MAY_BE = bounded_http.BLOCK / bounded_http.SLOWEST


@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "in pieces"])
@pytest.mark.parametrize(
    ("blocks", "seconds", "taken"),
    [(1000, AS_SLOW_AS_MAY_BE, True), (1000, 2 * AS_SLOW_AS_MAY_BE, False), (1, 59.0, True), (1, 70.0, False)],
)
def test_a_server_that_takes_a_request_slower_than_may_be_is_given_up(
    monkeypatch: pytest.MonkeyPatch, blocks: int, seconds: float, taken: bool, whole: bool
):
    inner = Taking(seconds)
    monkeypatch.setattr(bounded_http, "time", SimpleNamespace(monotonic=lambda: inner.now))
    line = bounded_http.Line(inner, bounded_http.Patience())
    pieces = [bytes(bounded_http.BLOCK * blocks)] if whole else [bytes(bounded_http.BLOCK)] * blocks
    for _ in range(2 if taken else 1):  # the next request has a time of its own
        with nullcontext() if taken else pytest.raises(httpcore.WriteTimeout):
            for piece in pieces:
                line.write(piece)
            line.read(1)


def running(server: Site) -> dict[str, Any]:  # noqa: F811
    """A job of FirecREST's that moves a file for ever."""
    job = Job(1000, "Transfer", "/", "/log", None, 0.0, state="RUNNING")
    server.lies["jobs/1000"] = {"jobs": [job.shown()]}
    return {"jobId": 1000, "system": SYSTEM, "logs": {"outputLog": "/log", "errorLog": "/log"}}


def test_a_transfer_job_that_runs_for_ever_holds_no_upload(
    server: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(firecrest_files, "TRANSFER_SECONDS", 2.0)
    running(server)
    pushed(server, tmp_path)
    assert sum("jobs/1000" in one for one in server.requests) > 1


def test_an_upload_goes_no_other_way_than_it_asked_for(server: Site, tmp_path: Path):  # noqa: F811
    """The answer named hosts and ports, of any network, for a protocol of its own that nothing bounds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        port = listener.getsockname()[1]
        named = json.dumps({"secret": "s", "ports": [port, port], "ips": ["127.0.0.1"]}).encode()
        way = {"transferMethod": "streamer", "coordinates": base64.urlsafe_b64encode(named).decode()}
        server.lies["transfer/upload"] = {"transferJob": running(server), "transferDirectives": way}
        assert not pushed(server, tmp_path).exists()
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_call_that_never_ends_is_given_up(
    server: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each answer comes in time, and asks for one more."""
    monkeypatch.setattr(bounded_http, "CALL_SECONDS", 1.0)

    def waits(client: Any) -> None:
        for _ in itertools.count():
            client.stat(SYSTEM, str(tmp_path))

    error = attacked(server, tmp_path, lambda one: one.ask(waits))
    assert isinstance(error, Rejected) and "one call takes too long" in str(error)
    assert act(server, tmp_path, command(f"test -d {tmp_path}")) == [("", 0)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", ["ops/stat", "ops/mkdir", "jobs", "/token"])
def test_a_facility_behind_a_hostile_firecrest_is_absent_by_name(tmp_path: Path, end: str):
    """Under StreamFlow, with an honest facility beside it, whatever is answered badly."""
    (tmp_path / "secret").write_text(SECRET)
    template = tmp_path / "job.sh"
    template.write_text("#!/bin/bash\n{{ streamflow_command }}\n")
    with FirecrestServer() as site:
        site.attacks[end] = ATTACKS["deep"]
        deployment = {
            "type": "firecrest",
            "firecrest": access(site, tmp_path),
            "template": str(template),
            "workdir": str(tmp_path / "site"),
            "polling_seconds": 1,
        }
        path = attacked_federation(tmp_path / "fed", {"broken": {}}, deployment=deployment, minimum_facilities=1)
        result = streamflow(path, tmp_path / "engine", timeout=500)
    assert result.returncode == 0, result.stdout[-3000:]
    rows = rows_of(path)
    assert rows[HONEST].status == "ok" and rows["broken"].status == "absent", rows
    assert "broken is left out of the round" in result.stdout and "left no update: FirecREST" in rows["broken"].reason

"""A small FirecREST v2 on this machine: its endpoints over a directory, and jobs as local processes.

Paths, bodies, status codes and answers follow the routers and models of eth-cscs/firecrest-v2 (`firecrest/compute`,
`firecrest/filesystem/ops` and `transfer`, `lib/scheduler_clients/models.py`) as pyfirecrest 3.10 calls them. They were
read, not recorded from a site.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

PART_BYTES = 1 << 20
SYSTEM, CLIENT, SECRET = "daint", "crossfed", "very-secret"


class Answer(Exception):
    """An HTTP answer other than 200."""

    def __init__(self, status: int, body: Any = None) -> None:
        self.status, self.body = status, body


def missing(path: str) -> Answer:
    return Answer(404, {"errorType": "error", "message": f"stat: cannot statx '{path}': No such file or directory"})


@dataclass
class Job:
    """One submitted script."""

    id: int
    name: str
    directory: str
    output: str
    process: subprocess.Popen[bytes] | None
    since: float
    held: bool = False
    state: str = ""
    """A state that hides the process's own."""
    code: int | None = None

    def shown(self) -> dict[str, Any]:
        code = self.process.poll() if self.process is not None else self.code
        state = self.state or ("RUNNING" if code is None else "COMPLETED" if code == 0 else "FAILED")
        status = {"state": state, "stateReason": "JobHeldUser" if state == "PENDING" else "None"}
        status |= {
            "exitCode": max(code, 0) if code is not None else 0,
            "interruptSignal": -code if code and code < 0 else 0,
        }
        times = {"elapsed": 1, "start": int(self.since), "end": None, "suspended": 0, "limit": 60}
        common = {"jobId": str(self.id), "name": self.name, "status": status, "time": times, "account": "csstaff"}
        place = {"allocationNodes": 1, "cluster": SYSTEM, "nodes": "nid001", "partition": "normal"}
        return common | place | {"user": "fireuser", "workingDirectory": self.directory, "priority": 1, "tasks": None}


@dataclass
class Site:
    """State of the server, which tests may change."""

    url: str = ""
    jobs: dict[int, Job] = field(default_factory=dict)
    staged: dict[str, dict[int, bytes]] = field(default_factory=dict)
    unknown_seconds: float = 0.0
    """A new job's record appears after so long, as with a lagging sacct."""
    broken: list[int] = field(default_factory=list)
    """Statuses that the next requests are answered with."""
    refuses: bool = False
    """The token endpoint refuses the client."""
    hold: bool = False
    """New jobs wait."""
    lies: dict[str, Any] = field(default_factory=dict)
    """Answers by end of the endpoint, in place of the true ones."""
    attacks: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    """What is done to the connection in place of an answer, by a part of the endpoint's path."""
    attacked: int = 0
    """Requests that an attack answered; they are not among `requests`."""
    sent: int = 0
    """Bytes of attacks that the other side took."""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    submissions: int = 0

    # Jobs

    def submit(self, body: dict[str, Any]) -> dict[str, Any]:
        job = body["job"]
        directory, script = job["working_directory"], job["script"]
        if not Path(directory).is_dir():
            raise Answer(500, {"message": "sbatch: error: Unable to open working directory"})
        if "#SBATCH --partition=none" in script:
            raise Answer(400, {"message": "sbatch: error: invalid partition specified: none"})
        self.submissions += 1
        return {"jobId": self.start(script, directory).id}

    def start(self, script: str, directory: str) -> Job:
        number = 1000 + len(self.jobs)
        name = re.search(r"^#SBATCH --job-name=(\S+)", script, re.M)
        output = re.search(r"^#SBATCH --output=(\S+)", script, re.M)
        path = output[1] if output else f"{directory}/slurm-{number}.out"
        if self.hold:
            process = None
        else:
            with open(path, "wb") as file:
                process = subprocess.Popen(
                    ["bash", "-c", script],
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        job = Job(number, name[1] if name else "", directory, path, process, time.time())
        job.state = "PENDING" if self.hold else ""
        self.jobs[number] = job
        return job

    def moved(self, directory: str, words: str) -> dict[str, Any]:
        """A transfer job that has ended: FirecREST's own."""
        log = Path(directory) / f".f7t_file_handling_job_{uuid.uuid4()}.log"
        log.write_text(f"{words}\n")
        number = 1000 + len(self.jobs)
        self.jobs[number] = Job(number, "Transfer", directory, str(log), None, 0.0, state="COMPLETED", code=0)
        logs = {"outputLog": str(log), "errorLog": str(log)}
        return {"jobId": number, "system": SYSTEM, "workingDirectory": directory, "logs": logs}

    def job(self, number: str) -> Job:
        found = self.jobs.get(int(number))
        if found is None or time.time() - found.since < self.unknown_seconds:
            raise Answer(404, {"errorType": "error", "message": "Job not found."})
        return found

    def cancel(self, number: str) -> None:
        job = self.job(number)
        if job.process is not None and job.process.poll() is None:
            os.killpg(job.process.pid, 15)
        job.state = "CANCELLED by 1000"
        raise Answer(204)

    def close(self) -> None:
        for job in self.jobs.values():
            if job.process is not None and job.process.poll() is None:
                os.killpg(job.process.pid, 9)
                job.process.wait()


def _entry(path: Path, name: str) -> dict[str, Any]:
    found = path.stat()
    kind = "d" if stat.S_ISDIR(found.st_mode) else "-"
    who = {"user": "fireuser", "group": "users", "permissions": "rw-r--r--", "lastModified": "2026-01-01T00:00:00"}
    return {"name": name, "type": kind, "linkTarget": None, "size": str(found.st_size)} | who


def _ls(query: dict[str, str]) -> list[dict[str, Any]]:
    root = Path(query["path"])
    if not root.exists():
        raise missing(query["path"])
    if root.is_file():
        return [_entry(root, str(root))]
    found = sorted(root.rglob("*") if query.get("recursive") == "true" else root.iterdir())
    return [_entry(path, str(path.relative_to(root))) for path in found]


def _stat(query: dict[str, str]) -> dict[str, int]:
    follow = query.get("dereference") == "true"
    try:
        found = os.stat(query["path"], follow_symlinks=follow)
    except OSError:
        raise missing(query["path"]) from None
    names = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "atime", "ctime", "mtime")
    return {name: int(getattr(found, f"st_{name}")) for name in names}


class Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunked()
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if attack := next((act for end, act in self.site.attacks.items() if end in parts.path), None):
            self.close_connection = True
            self.site.attacked += 1
            with suppress(OSError):
                attack(self)
            return
        try:
            answer = self._answer(self.command, parts.path, query, body)
            status = 201 if self.command == "POST" and "/staging" not in parts.path else 200
        except Answer as error:
            status, answer = error.status, error.body
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode() if answer is not None else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("f7t-appversion", "2.6.0")
        self.send_header("ETag", '"etag"')
        self.end_headers()
        self.wfile.write(content)

    def _chunked(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        site = self.site
        if path == "/token":
            return self._token(body)
        if path.startswith("/staging/"):
            return self._staging(method, path, query, body)
        site.requests.append(f"{method} {path}")
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in site.tokens:
            raise Answer(401, {"message": "Invalid or expired token"})
        if site.broken:
            raise Answer(site.broken.pop(0), {"message": "the scheduler timed out"})
        for end, lie in site.lies.items():
            if path.endswith(end):
                return lie
        if path == "/v2/status/systems":
            return {"systems": [{"name": SYSTEM}]}
        if path == f"/v2/status/{SYSTEM}/partitions":
            return {"partitions": [{"name": "normal"}]}
        if found := re.fullmatch(rf"/v2/compute/{SYSTEM}/jobs(?:/(\w+)(/metadata)?)?", path):
            return self._compute(method, found[1], bool(found[2]), body)
        if found := re.fullmatch(rf"/v2/filesystem/{SYSTEM}/(ops|transfer)/(\w+)", path):
            return self._files(method, f"{found[1]}/{found[2]}", query, body)
        raise Answer(404, {"message": f"no such endpoint {path}"})

    def _token(self, body: bytes) -> Any:
        given = {key: values[0] for key, values in parse_qs(body.decode()).items()}
        wanted = {"grant_type": "client_credentials", "client_id": CLIENT, "client_secret": SECRET}
        if self.site.refuses or given != wanted:
            raise Answer(401, {"error": "invalid_client"})
        token = uuid.uuid4().hex
        self.site.tokens.add(token)
        raise Answer(200, {"access_token": token, "expires_in": 300, "token_type": "Bearer"})

    def _compute(self, method: str, number: str | None, metadata: bool, body: bytes) -> Any:
        site = self.site
        if method == "POST":
            return site.submit(json.loads(body))
        if method == "DELETE":
            return site.cancel(str(number))
        if number is None:
            return {"jobs": [job.shown() for job in site.jobs.values()]}
        job = site.job(number)
        if metadata:
            return {"jobs": [{"jobId": number, "standardOutput": job.output, "script": None}]}
        return {"jobs": [job.shown()]}

    def _files(self, method: str, what: str, query: dict[str, str], body: bytes) -> Any:
        given = json.loads(body) if body and what != "ops/upload" else {}
        if what == "ops/ls":
            return {"output": _ls(query)}
        if what == "ops/stat":
            return {"output": _stat(query)}
        if what in ("ops/head", "ops/tail", "ops/view", "ops/download"):
            return self._read(what, query)
        if what == "ops/mkdir":
            Path(given["sourcePath"]).mkdir(parents=given["parent"], exist_ok=given["parent"])
            return {"output": _entry(Path(given["sourcePath"]), given["sourcePath"])}
        if what == "ops/chmod":
            os.chmod(given["path"], int(given["mode"], 8))
            return {"output": _entry(Path(given["path"]), given["path"])}
        if what == "ops/symlink":
            os.symlink(given["sourcePath"], given["linkPath"])
            return {"output": None}
        if what == "ops/rm":
            path = Path(query["path"])
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            raise Answer(204)
        if what == "ops/upload":
            return self._upload(query, body)
        return self._transfer(what, given)

    def _read(self, what: str, query: dict[str, str]) -> Any:
        if not (path := Path(query["path"])).is_file():
            raise missing(query["path"])
        content = path.read_bytes()
        if what == "ops/download":
            return content
        if what == "ops/view":
            return {"output": content.decode()}
        most = int(query["bytes"])
        part = content[:most] if what == "ops/head" else content[-most:]
        return {"output": {"content": part.decode(), "contentType": "bytes", "startPosition": 0, "endPosition": most}}

    def _upload(self, query: dict[str, str], body: bytes) -> Any:
        """One file of a multipart form."""
        boundary = b"--" + self.headers["Content-Type"].partition("boundary=")[2].encode()
        head, _, content = body.split(boundary)[1].partition(b"\r\n\r\n")
        name = re.search(rb'filename="([^"]+)"', head)
        assert name is not None
        (Path(query["path"]) / name[1].decode()).write_bytes(content[:-2])
        raise Answer(204)

    def _transfer(self, what: str, given: dict[str, Any]) -> Any:
        site, key = self.site, uuid.uuid4().hex
        if what == "transfer/upload":
            path, size = given["path"], given["transfer_directives"]["file_size"]
            site.staged[key] = {}
            urls = [f"{site.url}/staging/{key}?part={number + 1}" for number in range(-(-size // PART_BYTES))]
            end = f"{site.url}/staging/{key}?target={path}"
            way = {"partsUploadUrls": urls, "completeUploadUrl": end, "maxPartSize": PART_BYTES, "transferMethod": "s3"}
            job = site.moved(str(Path(path).parent.parent), "Files were successfully uploaded")
            return {"transferJob": job, "transferDirectives": way}
        if what == "transfer/download":
            path = given["source_path"]
            site.staged[key] = {1: Path(path).read_bytes()}
            way = {"downloadUrl": f"{site.url}/staging/{key}", "transferMethod": "s3"}
            job = site.moved(str(Path(path).parent), "Multipart file upload successfully completed")
            return {"transferJob": job, "transferDirectives": way}
        if what == "transfer/cp":
            source, target = given["sourcePath"], given["targetPath"]
            shutil.copytree(source, target) if Path(source).is_dir() else shutil.copy(source, target)
            return {"transferJob": site.moved(str(Path(target).parent), "Files were successfully copied")}
        raise Answer(404, {"message": f"no such endpoint {what}"})

    def _staging(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        """The object store beside FirecREST; its addresses are all it asks for."""
        parts = self.site.staged[path.removeprefix("/staging/")]
        if method == "PUT":
            parts[int(query["part"])] = body
            return b""
        content = b"".join(parts[number] for number in sorted(parts))
        if method == "POST":
            Path(query["target"]).write_bytes(content)
            return b""
        return content


class FirecrestServer:
    """Starts on a free port; `with` ends it and its jobs."""

    def __enter__(self) -> Site:
        site = Site()
        handler = type("SiteHandler", (Handler,), {"site": site})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        site.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.site = site
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return site

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.site.close()

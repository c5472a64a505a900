"""FirecREST v2 through `pyfirecrest`: bounded answers, and errors by what can be done about them.

Written against pyfirecrest 3.10 and the routers of eth-cscs/firecrest-v2. What the server answers is another
institution's: its size is bounded, and staging addresses that it names must be secure.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import asyncssh
import httpx
from firecrest import ClientCredentialsAuth
from firecrest.FirecrestException import ClientsCredentialsException, FirecrestException
from firecrest.v2 import Firecrest
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.notifying import is_private_address
from coordinator.streamflow_plugin.bounded_http import (
    ANSWER_BYTES,
    ANSWER_SECONDS,
    FILE_BYTES,
    OutOfBounds,
    Patience,
    bound_session,
    bounded_json,
    check_plain,
)
from facility.exchange.core_dumps import leave_no_core
from facility.exchange.errors import ManifestError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.messages.strict_json import Fields, clean_text

TOKEN_BYTES = 1 << 18
"""Of one answer of the token endpoint."""
SECRET_BYTES = 1 << 16
"""Of the file of a client's secret."""
PASSING = (408, 424, 425, 429, 500, 502, 503, 504)
"""Statuses that trying again may clear."""

T = TypeVar("T")


class Unreachable(ConnectionError):
    """No answer, or one that trying again may better."""

    def __init__(self, said: str, status: int = 0) -> None:
        """`status`: of the HTTP answer, 0 where there was none."""
        super().__init__(said)
        self.status = status


class NotThere(WorkflowExecutionException):
    """The file or job does not exist."""


class Rejected(WorkflowExecutionException):
    """FirecREST says no."""


class Identity(ClientCredentialsAuth):
    """Asks for tokens as the original does, through a bounded client that follows no redirection."""

    def __init__(self, client_id: str, secret: str, token_url: str, patience: Patience) -> None:
        super().__init__(client_id, secret, token_url)
        self.disable_client_logging = True
        self._session = httpx.Client(timeout=ANSWER_SECONDS, event_hooks={"response": [check_plain, self._bound]})
        bound_session(self._session, patience)
        self._token, self._until = "", 0.0

    def _bound(self, response: httpx.Response) -> None:
        bounded_json(response, TOKEN_BYTES)

    def get_access_token(self) -> str:
        """A token that holds for some seconds more. Raises `ClientsCredentialsException` or `OutOfBounds`."""
        if self._token and time.monotonic() <= self._until - self._min_token_validity:
            return self._token
        given = {"grant_type": "client_credentials", "client_id": self._client_id, "client_secret": self._client_secret}
        answer = self._session.post(self._token_uri, data=given)
        if not answer.is_success:
            raise ClientsCredentialsException([answer])
        found = Fields(raw=dict(answer.json()), where="the token endpoint's answer")
        token, seconds = found.text("access_token"), found.number("expires_in", most=1e9)
        if not re.fullmatch(r"[!-~]+", token):
            raise OutOfBounds("the token endpoint's answer holds no token")
        self._token, self._until = token, time.monotonic() + seconds
        return token


class Api:
    """One system behind one FirecREST. Calls block; any thread may make them."""

    def __init__(
        self, *, url: str, system: str, token_url: str, client_id: str, secret_file: str, account: str
    ) -> None:
        self.url, self.system, self.account = url, system, account or None
        self._token_url, self._client_id, self._secret_file = token_url, client_id, secret_file
        self._client: Firecrest | None = None
        self._turn = threading.Lock()
        self.patience = Patience()

    def call(self, act: Callable[[Firecrest], T]) -> T:
        """What `act` returns. Raises `asyncssh.PermissionDenied`, `Unreachable`, `NotThere` or `Rejected`."""
        try:
            with self._turn:
                client = self._client = self._client or self._connect()
            with self.patience.for_call():
                return act(client)
        except (OutOfBounds, ManifestError) as error:
            raise Rejected(f"FirecREST gives an answer that is not taken: {clean_text(str(error), 300)}") from None
        except ClientsCredentialsException as error:
            self._client = None
            status = error.responses[-1].status_code
            if status in PASSING:
                raise Unreachable(f"the token endpoint answers with {status}") from None
            raise asyncssh.PermissionDenied(f"the token endpoint refuses the client ({status})") from None
        except FirecrestException as error:
            raise self._meant(error) from None
        except httpx.UnsupportedProtocol as error:
            raise Rejected(str(error)) from None
        except httpx.TransportError as error:
            raise Unreachable(f"{type(error).__name__}: {error}"[:300]) from None
        except (OSError, MemoryError, WorkflowExecutionException):
            raise  # this machine's, or what was found already
        except Exception as error:
            raise Rejected(f"FirecREST's answer cannot be understood: {type(error).__name__}") from None

    def _connect(self) -> Firecrest:
        identity = Identity(self._client_id, read_secret(self._secret_file), self._token_url, self.patience)
        client = Firecrest(firecrest_url=self.url, authorization=identity)
        client.timeout, client.num_retries_rate_limit = ANSWER_SECONDS, 0
        client.disable_client_logging = True  # staging addresses are secrets
        client._session.event_hooks = {"request": [self._check_request], "response": [check_plain, self._bound]}
        bound_session(client._session, self.patience)
        return client

    def _check_request(self, request: httpx.Request) -> None:
        """Nothing goes over an open line, be it to a staging address that the server names.

        A server on this machine may name addresses on this machine without https; no other server may.
        """
        here = self.url.startswith("http://") and is_private_address(str(request.url))
        if request.url.scheme != "https" and not here:
            raise httpx.UnsupportedProtocol(f"FirecREST names an address without https at {request.url.host}")

    def _bound(self, response: httpx.Response) -> None:
        url = response.request.url
        if response.request.method == "GET" and not str(url).startswith(f"{self.url}/"):
            return  # a staged file, which its reader bounds
        bounded_json(response, FILE_BYTES if url.path.endswith("/ops/download") else ANSWER_BYTES)

    def _meant(self, error: FirecrestException) -> Exception:
        """The exception that says what can be done about an answer."""
        answers = error.responses
        status = getattr(answers[-1], "status_code", 0) if isinstance(answers, list) and answers else 0
        said = clean_text(_message(answers[-1]) if status else str(error), 300)
        if status == 401:
            self._client = None
            return asyncssh.PermissionDenied(f"FirecREST refuses the token: {said}")
        if status == 404:
            return NotThere(f"FirecREST: {said}")
        if status in PASSING:
            return Unreachable(f"FirecREST answers with {status}: {said}", status)
        return Rejected(f"FirecREST answers with {status or type(error).__name__}: {said}")


def read_secret(file: str) -> str:
    """The secret in a file. Raises `OSError`, also for what is not text: trying again does not better it."""
    leave_no_core()
    path = Path(file).expanduser()
    try:
        return read_bounded(path, SECRET_BYTES).decode().strip()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it is not UTF-8 text", str(path)) from None


def _message(answer: Any) -> str:
    try:
        found = answer.json()
        return str(found.get("message") or found)
    except (OutOfBounds, ValueError, AttributeError):
        return answer.content[:1000].decode(errors="replace") if isinstance(answer, httpx.Response) else ""

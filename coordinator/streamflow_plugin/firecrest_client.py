"""FirecREST v2 through `pyfirecrest`: bounded answers, and errors by what can be done about them.

Written against pyfirecrest 3.10 and the routers of eth-cscs/firecrest-v2. What the server answers is another
institution's: its size is bounded, and staging addresses that it names must be secure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import asyncssh
import httpx
import requests
from firecrest import ClientCredentialsAuth
from firecrest.FirecrestException import ClientsCredentialsException, FirecrestException
from firecrest.v2 import Firecrest
from streamflow.core.exception import WorkflowExecutionException

from coordinator.config.firecrest import HERE
from facility.exchange.messages.strict_json import clean

ANSWER_SECONDS = 60.0
ANSWER_BYTES = 16 << 20
"""Of one answer of the interface itself; staged files are bounded by who reads them."""
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


class BoundedStream(httpx.SyncByteStream):
    """A response's body; more than `most` bytes are an error."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most = stream, most

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for block in self._stream:
            count += len(block)
            if count > self._most:
                raise httpx.ReadError(f"more than {self._most} bytes in one answer")
            yield block

    def close(self) -> None:
        self._stream.close()


class Api:
    """One system behind one FirecREST. Calls block; any thread may make them."""

    def __init__(
        self, *, url: str, system: str, token_url: str, client_id: str, secret_file: str, account: str
    ) -> None:
        self.url, self.system, self.account = url, system, account or None
        self._token_url, self._client_id, self._secret_file = token_url, client_id, secret_file
        self._client: Firecrest | None = None
        self._turn = threading.Lock()

    def call(self, act: Callable[[Firecrest], T]) -> T:
        """What `act` returns. Raises `asyncssh.PermissionDenied`, `Unreachable`, `NotThere` or `Rejected`."""
        try:
            with self._turn:
                client = self._client = self._client or self._connect()
            return act(client)
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
        except (httpx.TransportError, requests.RequestException) as error:
            raise Unreachable(f"{type(error).__name__}: {error}"[:300]) from None
        except (httpx.HTTPError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Rejected(f"FirecREST's answer cannot be understood: {type(error).__name__}") from None

    def _connect(self) -> Firecrest:
        secret = Path(self._secret_file).expanduser().read_text().strip()
        identity = ClientCredentialsAuth(self._client_id, secret, self._token_url)
        identity.timeout, identity.disable_client_logging = ANSWER_SECONDS, True
        client = Firecrest(firecrest_url=self.url, authorization=identity)
        client.timeout, client.num_retries_rate_limit = ANSWER_SECONDS, 0
        client.disable_client_logging = True  # staging addresses are secrets
        client._session.event_hooks = {"request": [self._check_request], "response": [self._bound]}
        return client

    def _check_request(self, request: httpx.Request) -> None:
        """Nothing goes over an open line, be it to a staging address that the server names."""
        if request.url.scheme != "https" and not self.url.startswith(HERE):
            raise httpx.UnsupportedProtocol(f"FirecREST names an address without https at {request.url.host}")

    def _bound(self, response: httpx.Response) -> None:
        if str(response.request.url).startswith(self.url):
            response.stream = BoundedStream(response.stream, ANSWER_BYTES)

    def _meant(self, error: FirecrestException) -> Exception:
        """The exception that says what can be done about an answer."""
        answers = error.responses
        status = getattr(answers[-1], "status_code", 0) if isinstance(answers, list) and answers else 0
        said = clean(_message(answers[-1]) if status else str(error), 300)
        if status == 401:
            self._client = None
            return asyncssh.PermissionDenied(f"FirecREST refuses the token: {said}")
        if status == 404:
            return NotThere(f"FirecREST: {said}")
        if status in PASSING:
            return Unreachable(f"FirecREST answers with {status}: {said}", status)
        return Rejected(f"FirecREST answers with {status or type(error).__name__}: {said}")


def _message(answer: Any) -> str:
    try:
        found = answer.json()
        return str(found.get("message") or found)
    except (ValueError, AttributeError):
        return str(getattr(answer, "text", ""))

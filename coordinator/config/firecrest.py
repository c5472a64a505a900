"""`facilities[].deployment.firecrest`: a site that is reached by FirecREST, an HTTP interface, and not by ssh."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from coordinator.config.notifying import is_private_address
from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Line
from facility.exchange.validation import validated

FIRECREST = "firecrest"
"""`deployment.type` of such a facility."""
API = "firecrest-api"
"""Type in streamflow.yml of what its queue is wrapped around."""
SECURE = re.compile(r"https?://[^\s/@]+(/\S*)?")
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
REQUIRED = ("system", "token_url", "client_id", "client_secret_file")


@validated(frozen=True, kw_only=True)
class FirecrestAccess:
    """FirecREST, version 2, and the OpenID Connect client by which we are let in."""

    url: Line = ""
    """Address of FirecREST with the version's path, such as `https://api.cscs.ch/hpc/firecrest/v2`. Empty: not used."""
    system: Line = ""
    """The cluster's name there; `crossfed check` lists them when it is wrong."""
    token_url: Line = ""
    """Token endpoint of the site's identity provider, for the client-credentials grant."""
    client_id: Line = ""
    """Name of the client at that endpoint."""
    client_secret_file: Line = ""
    """File on this machine that holds the client's secret, readable by you alone."""
    account: Line = ""
    """Account that is charged for the jobs by which FirecREST moves large files; empty: the site wants none."""

    def __post_init__(self) -> None:
        if not self.url:
            for name in (*REQUIRED, "account"):
                if getattr(self, name):
                    raise ConfigurationError(f"{name} is set without url, expected FirecREST's address too", key="url")
            return
        for name in REQUIRED:
            if not getattr(self, name):
                raise ConfigurationError(f"{name} is missing, expected beside firecrest.url", key=name)
        for name in ("url", "token_url"):
            address = getattr(self, name)
            if not SECURE.fullmatch(address) or not is_private_address(address):
                raise ConfigurationError(f"{name} is {address!r}, expected an https:// address", key=name)
        for name in ("system", "account"):
            if (value := getattr(self, name)) and not WORD.fullmatch(value):
                raise ConfigurationError(f"{name} is {value!r}, expected a plain name", key=name)

    def streamflow(self) -> dict[str, Any]:
        """As the connector's settings in streamflow.yml; the secret itself is never written."""
        values = {
            "url": self.url.rstrip("/"),
            "system": self.system,
            "tokenUrl": self.token_url,
            "clientId": self.client_id,
            "clientSecretFile": str(Path(self.client_secret_file).expanduser()),
            "account": self.account,
        }
        return {key: value for key, value in values.items() if value}

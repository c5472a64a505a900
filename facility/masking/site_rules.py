"""What a site demands of secure aggregation, whatever a coordinator's settings say.

    export CROSSFED_PEER_SIGNERS=~/crossfed/peers    # the only allowed-signers file for the other facilities' keys
    export CROSSFED_MINIMUM_SUM=4                    # fewest updates in a sum that this facility helps to unmask

Set in the site's `site.sh`, which `env.sh` sources, or by its gate from `policy.yml`. Without them the settings decide,
and those are the coordinator's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.masking import MaskingSettings

PEER_SIGNERS = "CROSSFED_PEER_SIGNERS"
MINIMUM_SUM = "CROSSFED_MINIMUM_SUM"


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """The demands of one site."""

    peer_signers: Path | None = None
    """None: the file that the settings name."""
    minimum_sum: int = 0
    """Updates; 0: as the settings say."""

    def least(self, settings: MaskingSettings) -> int:
        """Fewest updates in a sum that may be unmasked here."""
        return max(settings.threshold, settings.minimum_sum, self.minimum_sum)

    def check(self, settings: MaskingSettings) -> None:
        """Raise `InputError` where the settings ask for what this site excludes."""
        named = resolve_path(settings.peer_signers)
        if self.peer_signers is not None and real_path(named) != real_path(self.peer_signers):
            raise InputError(
                f"the settings check the other facilities' keys against {settings.peer_signers}, this site allows "
                f"{self.peer_signers} alone: an account that can write that file can put its own keys in between"
            )
        if self.minimum_sum > len(settings.facilities):
            raise InputError(
                f"this site helps to unmask sums over {self.minimum_sum} updates or more, and the federation has "
                f"{len(settings.facilities)} facilities"
            )


def site_rules(environment: Mapping[str, str] = os.environ) -> SiteRules:
    """The rules that the environment holds. Raises `ConfigurationError`."""
    signers, least = environment.get(PEER_SIGNERS, ""), environment.get(MINIMUM_SUM, "") or "0"
    if not least.isdecimal():
        raise ConfigurationError(f"{MINIMUM_SUM} is {least!r}, expected a whole number of updates")
    return SiteRules(peer_signers=resolve_path(signers) if signers else None, minimum_sum=int(least))

"""What a site demands of a masked round, whatever its coordinator's settings say."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.masking import MaskingSettings
from facility.masking.site_rules import MINIMUM_SUM, PEER_SIGNERS, site_rules


def settings(signers: Path, **changes: object) -> MaskingSettings:
    given = {"bits": 32, "facilities": ["a", "b", "c"], "threshold": 2, "minimum_sum": 2, "peer_signers": str(signers)}
    return MaskingSettings(**given | changes)  # type: ignore[arg-type]


def test_a_sum_has_as_many_updates_as_the_site_the_settings_and_the_threshold_demand(tmp_path: Path):
    for demanded, changes, least in (
        ("", {}, 2),
        ("3", {}, 3),
        ("", {"minimum_sum": 3}, 3),
        ("1", {"threshold": 3}, 3),
    ):
        assert site_rules({MINIMUM_SUM: demanded}).least(settings(tmp_path, **changes)) == least


def test_what_a_site_excludes_is_refused_before_anything_is_trained(tmp_path: Path):
    asked = settings(tmp_path / "peers")
    site_rules({}).check(asked)
    site_rules({MINIMUM_SUM: "3", PEER_SIGNERS: str(tmp_path / "peers")}).check(asked)
    with pytest.raises(InputError, match="sums over 4 updates or more, and the federation has 3 facilities"):
        site_rules({MINIMUM_SUM: "4"}).check(asked)
    with pytest.raises(InputError, match="can put its own keys in between"):
        site_rules({PEER_SIGNERS: str(tmp_path / "others")}).check(asked)
    for odd in ("-1", "2.0", "many", " 3"):
        with pytest.raises(ConfigurationError, match="expected a whole number of updates"):
            site_rules({MINIMUM_SUM: odd})

"""Which of a facility's private keys stay on its disk, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from facility.masking.private_keys import PrivateKeys


def kept(keys: PrivateKeys) -> set[str]:
    return {path.stem for path in keys.directory.glob("*.json")}


def test_keys_stay_for_their_round_and_the_next_whichever_way_rounds_go(tmp_path: Path):
    """A round that is asked for again may still need either; after `crossfed rewind` later ones are of no use."""
    keys = PrivateKeys(state=tmp_path)
    drawn = {number: keys.draw(number)[0] for number in (6, 7, 8)}
    assert kept(keys) == {drawn[7], drawn[8]}
    again, _ = keys.draw(8)
    assert kept(keys) == {drawn[7], drawn[8], again}
    third, _ = keys.draw(3)
    assert kept(keys) == {third}


@pytest.mark.parametrize("left", [b"", b'{"round": 1', b"[]", b'{"round": "x"}', b"{}", b"\xff"])
def test_a_damaged_pair_keeps_nobody_from_drawing_new_ones(tmp_path: Path, left: bytes):
    keys = PrivateKeys(state=tmp_path)
    damaged, _ = keys.draw(1)
    (keys.directory / f"{damaged}.json").write_bytes(left)
    drawn, _ = keys.draw(1)
    assert kept(keys) == {drawn}

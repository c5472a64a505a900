"""Late and repeated updates that are not what they should be: each is its own facility's absence, and no more."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.archive.rounds import FacilityRow
from coordinator.config.closing import ClosingSettings
from coordinator.config.settings import CoordinatorSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.signatures import sign_manifest
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.rounds.carried import Carried

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is absent")
HONEST, OTHERS, ROUNDS = "d", "abc", 5
WAYS = ("sound", "another's key", "unsigned", "changed", "again")
"""How a facility's update arrives; `again`: signed, and averaged in an earlier round."""
REASONS = {
    "another's key": "signature",
    "unsigned": "sign",
    "changed": "sha256",
    "again": "was averaged already",
}


@dataclass
class Hostile:
    """A federation whose every round one honest facility closes, and what each update moves the weights by."""

    root: Path
    keys: Path
    federation: Carried = field(init=False)
    moved: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        aggregation = AggregationSettings(
            rule="mean",
            clip_ratio=0.0,
            maximum_share=1.0,
            guard=False,
            weights="equal",
            maximum_staleness=ROUNDS,
            staleness_exponent=0.0,
            allowed_signers=str(self.keys / "facilities"),
            screen=ScreenSettings(action="off"),
        )
        described = CoordinatorSettings(
            federation="f",
            rounds=ROUNDS,
            facilities=[*OTHERS, HONEST],
            keep_rounds=0,
            closing=ClosingSettings(quorum=1, grace=0.0, late="carry", late_weight="staleness"),
            aggregation=aggregation,
        )
        model = save_pico(self.root / "model", dtype="bfloat16", hidden_size=8, intermediate_size=16)
        self.federation = Carried(self.root, described, write=self.write).begin(model)

    def write(self, directory: Path, model: Path, name: str, *, round: int, way: str = "sound") -> Path:
        """An update that is signed as `way` says."""
        self.moved[name, round] = 0.125 * (1 + [*OTHERS, HONEST].index(name)) + round / 64
        write_update(directory, model, name, round=round, move=self.moved[name, round])
        if way != "unsigned":
            other = OTHERS[OTHERS.index(name) - 1] if way == "another's key" else name
            sign_manifest(directory, self.keys / other, kind="update")
        if way == "changed":
            weights = directory / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        return directory

    def close(self, arriving: Mapping[str, str]) -> dict[str, tuple[int, FacilityRow]]:
        """One round; by facility that arrived, the round that its update is of and what the archive says."""
        federation = self.federation
        federation.open()
        for name, way in arriving.items():
            if way == "again":
                federation.at_work[name] = federation.used(name)[-1]
        of, number = {name: federation.at_work[name] for name in (*arriving, HONEST)}, federation.number
        options = {name: {"way": way} for name, way in arriving.items() if way != "again"}
        federation.close([*arriving, HONEST], options)
        rows = {row.facility: row for row in federation.archive.read_round(number).facilities}
        return {name: (round, rows[name]) for name, round in of.items()}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        federation = self.federation
        checkpoint = open_checkpoint(federation.archive.round_directory(federation.number - 1) / "state" / "master")
        return {name: checkpoint.read(name).float() for name in checkpoint.tensors}


def absent_alone(folder: Path, keys: Path, arrivals: Sequence[Mapping[str, str]]) -> None:
    """A whole federation: what is refused is its facility's absence, and the others move the model as ever."""
    hostile = Hostile(folder, keys)
    first = open_checkpoint(hostile.federation.model)
    expected = {name: first.read(name).float() for name in first.tensors}
    sound: dict[str, list[int]] = {name: [] for name in (*OTHERS, HONEST)}
    for arriving in arrivals:
        arriving = {name: way for name, way in arriving.items() if way != "again" or sound[name]}
        number, found = hostile.federation.number, hostile.close(arriving)
        moves = []
        for name, (of, row) in found.items():
            way = arriving.get(name, "sound")
            if way == "sound":
                assert (row.status, row.staleness) == ("ok", number - of)
                moves.append(hostile.moved[name, of])
                sound[name].append(of)
            else:
                assert row.status == "refused" and REASONS[way] in row.reason, (way, row.reason)
                assert row.weight == 0 and row.round == number
        assert sum(row.weight for _, row in found.values()) == pytest.approx(1.0)
        assert hostile.federation.number == number + 1, "the round goes on"
        expected = {name: value + sum(moves) / len(moves) for name, value in expected.items()}
    assert {name: hostile.federation.used(name) for name in sound} == sound, "none lost, none twice"
    made = hostile.weights
    assert all(torch.allclose(made[name], value, atol=0.03) for name, value in expected.items())


ARRIVALS = st.lists(st.dictionaries(st.sampled_from(OTHERS), st.sampled_from(WAYS)), min_size=ROUNDS, max_size=ROUNDS)
EACH = [
    {"a": "sound"},
    {"a": "again", "b": "another's key"},
    {"b": "sound", "c": "unsigned"},
    {"a": "changed", "b": "again", "c": "sound"},
    {"a": "sound", "b": "sound", "c": "again"},
]
"""Every way, in time and late."""


def test_each_way_is_that_facilitys_absence_by_name(tmp_path: Path, keys: Path):
    absent_alone(tmp_path, keys, EACH)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(arrivals=ARRIVALS)
def test_and_so_it_is_in_whatever_order_they_arrive(keys: Path, arrivals: list[dict[str, str]]):
    with tempfile.TemporaryDirectory() as folder:
        absent_alone(Path(folder), keys, arrivals)

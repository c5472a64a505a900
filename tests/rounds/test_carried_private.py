"""Late updates that are differences, signed, of private training: used once each, and each step paid for once.

Facilities do what a job does around its training, with the product's own code: they verify the signed order, take the
model as it was sent, enter their noised steps in the ledger, make the update smaller and sign it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.config.closing import ClosingSettings
from coordinator.config.settings import CoordinatorSettings, SendingSettings
from coordinator.rounds.order import order
from coordinator.steps.send import outgoing
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.manifest import read_manifest, sha256_of
from facility.exchange.messages.order import verify_order
from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.messages.signatures import sign_manifest
from facility.exchange.privacy.accounting import epsilon_of
from facility.rounds.models import Models, digest_of, note_kept_model
from facility.rounds.privacy_ledger import Entry, ReleaseLedger
from facility.rounds.smaller import make_smaller
from facility.training.privacy.budget import choose_noise
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.rounds.carried import Carried

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is absent")
NAMES, ROUNDS, STEPS, RATE = "abc", 4, 4, 0.1
DIFFERENTIAL = DifferentialSettings(epsilon=3.0, delta=1e-5, unit="block")
TRAINING = TrainingSettings(steps=STEPS, learning_rate=1e-3, encoding="delta-int8", export_dtype="float32")


@dataclass
class Site:
    """What facilities do around the training of a round, and what they moved their weights by."""

    root: Path
    keys: Path
    federation: Carried = field(init=False)
    moved: dict[tuple[str, int], float] = field(default_factory=dict)
    sent: dict[tuple[str, int], str] = field(default_factory=dict)

    def ledger(self, name: str) -> ReleaseLedger:
        return ReleaseLedger(state=self.root / "state" / name)

    def settings_of(self, name: str) -> Path:
        path = self.root / f"{name}.json"
        path.write_text(json.dumps({"facility": name}))
        return path

    def write(self, directory: Path, model: Path, name: str, *, round: int, signer: str = "") -> Path:
        """One round of a facility: in place of `write_update`, and with it as the training."""
        coordinator = self.federation.settings
        what = outgoing(self.federation.archive, coordinator, name, round)
        self.sent[name, round] = what.encoding
        received = self.root / "received" / f"{name}-{round}"
        shutil.copytree(what.path, received)
        order(received, coordinator)
        verify_order(
            received,
            self.settings_of(name),
            federation="f",
            facility=name,
            round=round,
            rounds=ROUNDS,
            allowed_signers=self.keys / "coordinators",
        )
        state = self.root / "state" / name
        here = Models(state).whole(received)
        assert read_manifest(here).content_sha256 == read_manifest(model).content_sha256, "what the archive holds"
        self.train_privately(name, round)
        self.moved[name, round] = 0.125 * (1 + NAMES.index(name)) + round / 64
        write_update(directory, here, name, round=round, move=self.moved[name, round])
        patterns = Patterns((), ())
        make_smaller(directory, model=here, state=state, round=round, settings=TRAINING, patterns=patterns)
        note_kept_model(directory, digest_of(read_manifest(received)))
        sign_manifest(directory, self.keys / (signer or name), kind="update")
        return directory

    def train_privately(self, name: str, round: int) -> None:
        """Every step in the ledger before its noise is used, as `facility.training.privacy.private` does it."""
        ledger = self.ledger(name)
        ledger.open()
        noise = choose_noise(
            DIFFERENTIAL,
            ledger.releases("training"),
            planned=ROUNDS * STEPS,
            left=(ROUNDS - round) * STEPS,
            sampling_rate=RATE,
            what="steps",
        )
        for _ in range(STEPS):
            step = Entry(kind="training", round=round, unit="block", noise_multiplier=noise, sampling_rate=RATE)
            ledger.record(step)
        ledger.close()


def begun(root: Path, keys: Path) -> Site:
    """A federation whose every update closes a round of its own, and counts the same whenever it comes."""
    site = Site(root, keys)
    aggregation = AggregationSettings(
        rule="mean",
        clip_ratio=0.0,
        maximum_share=1.0,
        guard=False,
        weights="equal",
        maximum_staleness=ROUNDS,
        staleness_exponent=0.0,
        allowed_signers=str(keys / "facilities"),
        screen=ScreenSettings(action="off"),
    )
    described = CoordinatorSettings(
        federation="f",
        rounds=ROUNDS,
        facilities=list(NAMES),
        keep_rounds=0,
        closing=ClosingSettings(quorum=1, grace=0.0, late="carry", late_weight="staleness"),
        aggregation=aggregation,
        sending=SendingSettings(encoding="delta-int8", signing_key=str(keys / "f")),
        settings_sha256={name: sha256_of(site.settings_of(name)) for name in NAMES},
    )
    model = save_pico(root / "model", dtype="bfloat16", hidden_size=8, intermediate_size=16)
    site.federation = Carried(root, described, write=site.write).begin(model)
    return site


def master_of(site: Site) -> dict[str, torch.Tensor]:
    federation = site.federation
    checkpoint = open_checkpoint(federation.archive.round_directory(federation.number - 1) / "state" / "master")
    return {name: checkpoint.read(name).float() for name in checkpoint.tensors}


def used_once_and_paid_for_once(folder: Path, keys: Path, arrivals: Sequence[set[str]]) -> None:
    """A whole federation. What every round moves the weights by is known by hand, and the last waits for all."""
    site = begun(folder, keys)
    federation = site.federation
    first = open_checkpoint(federation.model)
    expected = {name: first.read(name).float() for name in first.tensors}
    for names in [*arrivals, set(NAMES)]:
        federation.open()
        starts = {name: federation.at_work[name] for name in names}
        federation.close(sorted(names))
        step = sum(site.moved[name, began] for name, began in starts.items()) / len(starts)
        expected = {name: value + step for name, value in expected.items()}
    made = master_of(site)
    for name, value in expected.items():
        assert torch.allclose(made[name], value, atol=0.03), name
    for name in NAMES:
        used, ledger = federation.used(name), site.ledger(name)
        trained = sorted(round for one, round in site.moved if one == name)
        assert used == trained == sorted(set(used)), "none lost, none twice"
        assert ledger.count("training") == STEPS * len(used), "and none was trained again"
        assert epsilon_of(ledger.releases("training"), DIFFERENTIAL.delta) <= DIFFERENTIAL.epsilon
    in_time = {(row.facility, row.round + 1) for row in federation.rows() if row.status == "ok" and not row.staleness}
    for (name, round), encoding in site.sent.items():
        assert encoding == ("delta-int8" if (name, round) in in_time else "full"), (name, round)


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", [[{"a"}, {"a", "b"}, {"c"}]])
def test_each_update_moves_the_model_once_and_each_step_is_paid_for_once(
    tmp_path: Path, keys: Path, arrivals: list[set[str]]
):
    """`c` is two rounds late, `b` one; `a` is in time twice, and then gets a difference."""
    used_once_and_paid_for_once(tmp_path, keys, arrivals)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(arrivals=st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=ROUNDS - 1, max_size=ROUNDS - 1))
def test_and_so_it_is_in_whatever_order_they_arrive(keys: Path, arrivals: list[set[str]]):
    with tempfile.TemporaryDirectory() as folder:
        used_once_and_paid_for_once(Path(folder), keys, arrivals)


def test_a_late_update_under_another_signature_is_refused_and_costs_the_budget_nothing_more(tmp_path: Path, keys: Path):
    site = begun(tmp_path, keys)
    federation = site.federation
    federation.close("a")
    federation.close("bc", {"c": {"signer": "a"}})
    rows = {row.facility: row for row in federation.archive.read_round(1).facilities}
    assert rows["c"].status == "refused" and "sign" in rows["c"].reason
    assert rows["b"].status == "ok" and rows["b"].staleness == 1
    sign_manifest(tmp_path / "jobs" / "c-0", keys / "c", kind="update")  # the same update, as its facility keeps it
    federation.at_work["c"] = 0
    federation.close("c")
    assert federation.used("c") == [0] and site.ledger("c").count("training") == STEPS

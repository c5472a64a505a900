"""Laws of updates that the trainer masks from memory: every bit is that of one masked from disk, and a job that is
killed anywhere sends one sound update, of which no two contents were ever masked by the same seeds."""

from __future__ import annotations

import dataclasses
import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.archive.rounds import Archive
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.masking.fixed_point import clip_of, fixed_point
from facility.exchange.masking.roster import read_roster
from facility.exchange.masking.shares import OWN
from facility.exchange.masking.streams import SIGNED, UNSIGNED, MaskBuffer, places_of
from facility.exchange.masking.walks import walk_of
from facility.exchange.messages.manifest import read_manifest, verify_manifest, with_run
from facility.exchange.messages.masking import MaskedMoments
from facility.exchange.messages.settings import FacilitySettings, read_facility_settings
from facility.exchange.messages.signatures import verify_signature
from facility.masking import mask_update as masking
from facility.masking.private_keys import PrivateKeys
from facility.rounds import held, masked, smaller
from facility.rounds.finished import Finished
from facility.rounds.held import drop_held, is_held, read_held
from facility.rounds.masked import Masked, unmasked_path
from facility.rounds.one_round import OneRound
from facility.rounds.sealed import find_flaw
from facility.rounds.smaller import drop_pending, pending_residual, residual_path
from tests.aggregation import make
from tests.cases import slow_but
from tests.engine.harms import flipped
from tests.masking.federation import Masking
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

ME, KEY = "beta", "of the model, the settings and the data"
STEPS, SEQUENCES, RATE = 3, 4, 1e-2


@dataclasses.dataclass(kw_only=True)
class Pico(Masking):
    """A federation whose model the real trainer trains, at one facility; a folder for each attempt."""

    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    largest_step: float = 2 * STEPS * RATE
    attempts: int = 0

    def __post_init__(self) -> None:
        self.archive = Archive(self.root / "archive")
        self.archive.begin(save_pico(self.root / "initial", dtype="bfloat16"), "test")
        self.dataset = write_dataset(self.root / "data")

    def command(self, *options: str) -> list[str]:
        """The trainer's arguments, its settings written; each attempt leaves its update where `facility.round` does."""
        self.attempts += 1
        case = arguments(
            self.root / "job", self.model(), self.dataset, learning_rate=RATE, steps=STEPS, **self.training
        )
        path = self.root / "job" / "settings.json"
        raw = json.loads(path.read_text()) | {"federation": "test", "facility": ME, "rounds": 9}
        raw["training"] |= {"batch_sequences": SEQUENCES, "signing_key": str(self.signers.parent / ME)}
        path.write_text(json.dumps(raw | {"masking": dataclasses.asdict(self.masking)}))
        case[case.index("--out") + 1], case[case.index("--state") + 1] = str(self.trained), str(self.state(ME))
        return [*case, *options]

    @property
    def trained(self) -> Path:
        return unmasked_path(self.state(ME), 0)

    @property
    def told(self) -> FacilitySettings:
        return read_facility_settings(self.root / "job" / "settings.json")

    def drawn(self) -> Path:
        """A roster under new keys of all."""
        self.command()
        walk = walk_of(self.told)
        self.tokens, self.training_steps = (
            dict.fromkeys(self.names, STEPS * SEQUENCES),
            dict.fromkeys(self.names, STEPS),
        )
        return self.roster([self.keys(name, walk=walk) for name in self.names])

    def masks(self, roster: Path) -> Masked:
        made = masked.read_masking(
            dataclasses.replace(self.told, masking=dataclasses.replace(self.masking, peer_signers=str(self.signers))),
            self.state(ME),
            roster,
            self.model(),
            0,
            dataset=self.dataset,
        )
        assert made is not None
        return made

    @property
    def masking(self):  # type: ignore[override]
        return dataclasses.replace(super().masking, peer_signers=str(self.signers))

    def attempt(self, roster: Path, out: Path) -> Path:
        """What a job of the round does, with the real trainer, as `facility.round` orders it."""
        finished, masks = Finished(self.state(ME)), self.masks(roster)
        found = finished.find(KEY, 0)
        if found is None or not masks.can_make(found):
            drop_pending(self.state(ME))
            drop_held(self.state(ME))
            shutil.rmtree(self.trained, ignore_errors=True)
            self.trained.parent.mkdir(parents=True, exist_ok=True)
            rounds_in([("one", self.command("--roster", str(roster)))])
            verify_manifest(self.trained)
            with_run(self.trained, read_manifest(self.model()).extra["run"])
            finished.keep(KEY, 0, self.trained)
            shutil.rmtree(self.trained)
            found = finished.place(0)
        masks.make(found, received=self.model(), key=KEY, out=out)
        return out


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


def as_before_the_round(state: Path) -> None:
    """Leave the keys alone."""
    for path in [*state.iterdir(), *(state / "masking").iterdir()]:
        if path.is_dir() and path.name not in ("masking", "keys"):
            shutil.rmtree(path)


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every update have the same own seed, so that two can be compared."""
    monkeypatch.setattr(masking, "draw_seed", lambda: bytes(range(32)))


CASES: dict[str, dict[str, Any]] = {
    "32 bits": {"bits": 32},
    "16 bits": {"bits": 16},
    "half precision": {"bits": 16, "training": {"export_dtype": "bfloat16"}},
    "clipped": {"bits": 32, "privacy": {"clip_norm": 0.01}},
    "adapters": {"bits": 16, "training": {"lora": {"rank": 4}}},
    "moments": {"bits": 32, "training": {"optimizer_state": "shared"}, "moments": MaskedMoments(range=1.0)},
}


@pytest.mark.parametrize("case", slow_but(["16 bits", "clipped", "adapters", "moments"], CASES))
def test_every_bit_is_that_of_an_update_masked_from_disk(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, case: str
):
    settled(monkeypatch)
    pico = Pico(root=tmp_path, signers=signers, **CASES[case])
    roster, state = pico.drawn(), pico.state(ME)
    (state / "masking").mkdir(exist_ok=True)
    rounds_in([("disk", pico.command())])
    assert not is_held(pico.trained)
    member = PrivateKeys(state=state).of(read_roster(roster, pico.masking, signers), ME)
    with_run(pico.trained, read_manifest(pico.model()).extra["run"])
    masking.mask_update(
        pico.trained,
        received=pico.model(),
        out=tmp_path / "disk",
        residual_out=tmp_path / "rest",
        member=member,
        settings=pico.masking,
    )
    as_before_the_round(state)
    memory = pico.attempt(roster, tmp_path / "memory")
    assert is_held(Finished(state).place(0)), "no weights were written but masked ones and what these leave"
    left, right = bytes_of(tmp_path / "disk"), bytes_of(memory)
    assert left == right and sum(map(len, left.values())) > 1000
    rest = residual_path(state, 0)
    assert bytes_of(tmp_path / "rest") == bytes_of(rest) and find_flaw(rest) == ""
    assert not pending_residual(state).exists()
    moments = [bytes_of(path / "second_moments") for path in (tmp_path / "disk", memory)]
    assert moments[0] == moments[1] and bool(moments[0]) == (case == "moments")
    verify_signature(memory, ME, signers)
    manifests = [read_manifest(path) for path in (tmp_path / "disk", memory)]
    assert manifests[0].files.keys() == manifests[1].files.keys()
    assert dataclasses.replace(manifests[0], files={}) == dataclasses.replace(manifests[1], files={})


class KilledError(BaseException):
    """The process ends here, as with SIGKILL: nothing is caught or tidied up."""


PLACES: dict[str, list[tuple[Any, str]]] = {
    "while it trains": [(held, "mask_tensors")],
    "before what is left is sealed": [(held, "write_seal")],
    "before the seeds are written": [(held, "write_bytes")],
    "before the update is kept": [(Finished, "keep")],
    "before it is sent": [(masked, "keep_rest")],
    "as what is left is kept": [(smaller, "fsync_directory")],
    "before it is complete": [(masked, "complete_masked_update")],
    "before it is signed": [(masked, "sign_update")],
    "before it is kept as sent": [(Finished, "keep")],
}


def sums_to(pico: Pico, sent: Path, roster: Path, own: bytes, told: make.Tensors) -> None:
    """What was sent, its masks taken off, plus what is left is the step to within the rounding of the latter."""
    state = pico.state(ME)
    tensors = make.read_all(pico.model())
    member = PrivateKeys(state=state).of(read_roster(roster, pico.masking, pico.signers), ME)
    rest, numbers = make.read_all(residual_path(state, 0)), open_checkpoint(sent)
    assert read_manifest(sent).extra["masking"]["roster"] == member.roster.digest
    bits = member.roster.agreement.bits
    places = places_of({name: entry.elements for name, entry in numbers.tensors.items()})
    weights = member.roster.weights(pico.masking.weights, pico.masking.maximum_share)
    for name, entry in numbers.tensors.items():
        with open(entry.file, "rb") as file:
            file.seek(entry.start)
            found = np.frombuffer(file.read(entry.size), UNSIGNED[bits]).copy()
        buffer = MaskBuffer(len(found), bits)
        for sign, seed in masking.signed_seeds(member, own):
            buffer.add_to(found, -sign, seed, places[name])
        agreement = member.roster.agreement
        clip = clip_of(name, entry.shape, clips=agreement.clips, default=agreement.default_clip, new=False)
        unit = fixed_point(bits, clip, weights).scale / weights[ME]
        step = found.view(SIGNED[bits]) * unit + rest[name].double().numpy().ravel()
        wanted = told[name].double().numpy().ravel() - tensors[name].double().numpy().ravel()
        rounding = 2.0**-22 * max(1.0, float(told[name].abs().max()))  # of the weights in float32, there and back
        assert np.abs(step - wanted).max() <= unit * 2.0**-7 + rounding, name


def trained_to_disk(pico: Pico) -> make.Tensors:
    """The update that training comes to each time, written whole, in float32."""
    (pico.state(ME) / "masking").mkdir(exist_ok=True)
    rounds_in([("disk", pico.command())])
    return {name: value.float() for name, value in make.read_all(pico.trained).items()}


def seeds_drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every seed of its own that the facility draws from here on."""
    drawn: list[bytes] = []
    draw = masking.draw_seed

    def noted() -> bytes:
        drawn.append(draw())
        return drawn[-1]

    monkeypatch.setattr(masking, "draw_seed", noted)
    return drawn


@pytest.mark.parametrize("again", [pytest.param("the same roster", marks=pytest.mark.slow), "another roster"])
def test_killed_anywhere_the_next_job_sends_the_update_and_trains_once_it_is_kept(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, again: str
):
    """One place after the other; training comes to the same update each time."""
    pico = Pico(root=tmp_path, signers=signers, bits=16, largest_step=0.2)
    roster, state = pico.drawn(), pico.state(ME)
    told, drawn = trained_to_disk(pico), seeds_drawn(monkeypatch)
    contents: dict[bytes, bytes] = {}
    for number, (words, targets) in enumerate(PLACES.items()):
        as_before_the_round(state)
        trained: list[str] = []
        with monkeypatch.context() as patch:
            for owner, name in targets:
                patch.setattr(owner, name, killing(getattr(owner, name), skip=words == "before it is kept as sent"))
            with pytest.raises(KilledError):
                pico.attempt(roster, tmp_path / "out" / f"{number}-killed")
        kept = Finished(state).find(KEY, 0) is not None
        second = roster if again == "the same roster" else pico.drawn()
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.rounds_in", counting(trained))
            sent = pico.attempt(second, tmp_path / "out" / f"{number}")
        assert bool(trained) != kept, f"killed {words}: trained again unless it was kept"
        verify_manifest(sent)
        sums_to(pico, sent, second, drawn[-1], told)
        for path in [*tmp_path.glob("out/*/model.safetensors"), *state.rglob("sent/model.safetensors")]:
            shares = (path.parent / "shares.json").read_bytes()
            assert contents.setdefault(path.read_bytes(), shares) == shares, "one content, one set of shares"
        assert len({json.loads(one)["commitments"][OWN] for one in contents.values()}) == len(contents)
        roster = second


def counting(trained: list[str]) -> Callable[..., Any]:
    """The trainer, which notes that it ran."""
    real = rounds_in

    def instead(cases: list[tuple[str, list[str]]]) -> None:
        trained.append("again")
        real(cases)

    return instead


def killing(function: Callable[..., Any], *, skip: bool) -> Callable[..., Any]:
    """Ends the process in place of the call; `skip`: of the second call."""
    calls: list[int] = []

    def instead(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if skip and len(calls) == 1:
            return function(*arguments, **options)
        raise KilledError

    return instead


@pytest.mark.parametrize("what", slow_but(["sent"], ["sent", "rest", "seeds"]))
def test_an_update_whose_masked_tensors_are_damaged_is_trained_again(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    pico = Pico(root=tmp_path, signers=signers)
    roster, state = pico.drawn(), pico.state(ME)
    pico.attempt(roster, tmp_path / "first")
    masks, found = pico.masks(roster), Finished(state).place(0)
    assert masks.can_make(found)
    held_place = state / "masking" / "held"
    damaged = {
        "sent": held_place / "sent" / "model.safetensors",
        "rest": residual_path(state, 0) / "model.safetensors",
        "seeds": held_place / "held.json",
    }[what]
    damaged.write_bytes(flipped(damaged.read_bytes()))
    assert not masks.can_make(found)
    job = OneRound.__new__(OneRound)
    job.job, job.finished, job.key, job.masks = Namespace(round=0), Finished(state), KEY, masks  # type: ignore[assignment]
    assert not job.finished_before(), "a job of the round does not take it for finished"
    assert (held_place / "held.json").stat().st_mode & 0o077 == 0, "seeds are for this account alone"
    if what == "seeds":
        with pytest.raises(InputError, match="what was masked of them is not here"):
            pico.masks(pico.drawn()).make(found, received=pico.model(), key=KEY, out=tmp_path / "second")
    assert read_held(state, 1) is None, "of another round"
    trained: list[str] = []
    monkeypatch.setattr(f"{__name__}.rounds_in", counting(trained))
    verify_manifest(pico.attempt(pico.drawn(), tmp_path / "third"))
    assert trained and pico.masks(roster).can_make(found) and find_flaw(residual_path(state, 0)) == ""


def test_shards_of_several_ranks_are_written_whole_and_masked_afterwards(tmp_path: Path, signers: Path):
    pico = Pico(root=tmp_path, signers=signers)
    roster, state = pico.drawn(), pico.state(ME)
    (state / "masking").mkdir(exist_ok=True)
    rounds_in([("fsdp", pico.command("--roster", str(roster)))], ranks=2)
    assert not is_held(pico.trained) and not (state / "masking" / "held").exists()


def test_a_roster_that_was_changed_since_the_job_began_trains_nothing(tmp_path: Path, signers: Path):
    pico = Pico(root=tmp_path, signers=signers)
    roster = pico.drawn()
    path = next(roster.glob("*.json"))
    path.write_text(path.read_text().replace('"round": 0', '"round": 1', 1))
    (pico.state(ME) / "masking").mkdir(exist_ok=True)
    rounds_in([("changed", pico.command("--roster", str(roster)))], expect=2)
    assert not pico.trained.exists()


ANEW: dict[str, tuple[Any, str]] = {
    "before masks are taken off": (masked, "take_off"),
    "before the whole update is kept": (Finished, "keep"),
    "before what was masked is dropped": (masked, "drop_held"),
    "before it is masked": (masked, "mask_update"),
    "before what is left is kept": (masked, "keep_residual"),
    "before it is signed": (masked, "sign_update"),
}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 32])
def test_killed_anywhere_as_it_is_masked_anew_the_next_job_sends_it_and_nothing_is_trained_again(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, bits: int
):
    pico = Pico(root=tmp_path, signers=signers, bits=bits, largest_step=0.2)
    first, state = pico.drawn(), pico.state(ME)
    told, drawn = trained_to_disk(pico), seeds_drawn(monkeypatch)
    for number, (owner, name) in enumerate(ANEW.values()):
        as_before_the_round(state)
        pico.attempt(first, tmp_path / "out" / f"{number}-first")
        second = pico.drawn()
        trained: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.rounds_in", counting(trained))
            with monkeypatch.context() as inner:
                inner.setattr(owner, name, killing(getattr(owner, name), skip=False))
                with pytest.raises(KilledError):
                    pico.attempt(second, tmp_path / "out" / f"{number}-killed")
            sent = pico.attempt(second, tmp_path / "out" / f"{number}")
        verify_manifest(sent)
        assert not trained and not is_held(Finished(state).place(0)) and not (state / "masking" / "held").exists()
        sums_to(pico, sent, second, drawn[-1], told)
        assert len(set(drawn)) == len(drawn)

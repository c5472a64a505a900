"""A federation with secure aggregation in one process: real keys, rosters, masks, requests and answers, no engine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.config.privacy import PrivacySettings
from coordinator.config.settings import ClaimSettings, CoordinatorSettings
from coordinator.masking.rosters import make_roster, open_roster, settings_of
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.expectation import Expected
from coordinator.steps.masked_round import close_masked_round, settle
from coordinator.steps.receive import receive
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from facility.exchange.files.durable import new_directory
from facility.exchange.masking.roster import Keys, Roster, read_roster, write_keys
from facility.exchange.masking.unmasking import read_request, write_answer
from facility.exchange.messages import report
from facility.exchange.messages.manifest import read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.masking import MaskedMoments, MaskingSettings
from facility.masking.answering import answer_request
from facility.masking.mask_update import mask_update
from facility.masking.private_keys import PrivateKeys
from facility.masking.site_rules import SiteRules
from tests.aggregation import make

Second = Mapping[str, Factors]
SHAPES = {"a": (5, 7), "b.weight": (300, 500), "c": (3,)}


def ssh_keys(folder: Path, names: Sequence[str]) -> Path:
    """A signing key for each name that has none there, and the allowed-signers file with all; returns that."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in [name for name in names if not (folder / name).exists()]:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    for file in sorted(folder.glob("*.pub")):
        public = file.read_text().split()
        lines.append(f'{file.stem} namespaces="crossfed" {public[0]} {public[1]}\n')
    (folder / "signers").write_text("".join(lines))
    return folder / "signers"


@dataclass(kw_only=True)
class Masking:
    """Facilities with keys and states of their own, and the coordinator's archive."""

    root: Path
    names: tuple[str, ...] = ("alpha", "beta", "gamma")
    signers: Path
    """With the private keys beside it."""
    bits: int = 16
    rule: str = "mean"
    largest_step: float = 0.01
    privacy: dict[str, Any] = field(default_factory=dict)
    """Changes to `privacy:`; sums of two are allowed here, so that one of three facilities may be lost."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Further keys of the coordinator's settings."""
    dtype: torch.dtype = torch.float32
    tokens: dict[str, int] = field(default_factory=dict)
    training_steps: dict[str, int] = field(default_factory=dict)
    told_else: dict[str, str] = field(default_factory=dict)
    """`told` of keys, by facility."""
    moments: MaskedMoments | None = None
    """How second moments travel under masks."""
    rules: SiteRules = field(default_factory=SiteRules)
    """Of every facility."""
    kept: float = 0.5
    """Share of the received second moments in those of an update."""
    calls: int = 0

    def __post_init__(self) -> None:
        self.archive = Archive(self.root / "archive")
        initial = make.checkpoint(self.root / "initial", make.random_tensors(1, SHAPES, self.dtype))
        self.archive.begin(initial, "test")

    @property
    def settings(self) -> CoordinatorSettings:
        return CoordinatorSettings(
            federation="test",
            facilities=list(self.names),
            sequences=dict.fromkeys(self.names, 0),
            aggregation=AggregationSettings(rule=self.rule, allowed_signers=str(self.signers)),
            privacy=PrivacySettings(
                secure_aggregation=True, bits=self.bits, peer_signers="x", **({"minimum_sum": 2} | self.privacy)
            ),
            claims=ClaimSettings(action="off"),
            largest_step=self.largest_step,
            masked_moments=self.moments,
            **({"rounds": 9} | self.changes),
        )

    @property
    def masking(self) -> MaskingSettings:
        return settings_of(self.settings)

    def model(self, number: int = 0) -> Path:
        return self.archive.model_for(number)

    def state(self, name: str) -> Path:
        return self.root / "states" / name

    def place(self, what: str) -> Path:
        """A new path."""
        self.calls += 1
        path = self.root / "work" / f"{self.calls}" / what
        path.parent.mkdir(parents=True)
        return path

    def keys(self, name: str, number: int = 0, *, signer: str | None = None, walk: str = "0" * 64) -> Path:
        """The step `keys` of one facility that was told settings with the digest `walk`."""
        generation, public_key = PrivateKeys(state=self.state(name)).draw(number)
        count = self.tokens.get(name, 100)
        keys = Keys(
            federation="test",
            facility=name,
            round=number,
            generation=generation,
            public_key=public_key,
            steps=self.training_steps.get(name, 10),
            samples=count,
            tokens=count,
            walk=walk,
            told=self.told_else.get(name, ""),
        )
        with new_directory(self.place("keys")) as out:
            write_keys(out, keys, self.signers.parent / (signer or name))
        return self.root / "work" / f"{self.calls}" / "keys"

    def roster(self, keys: Sequence[Path], number: int = 0) -> Path:
        out = self.place("roster")
        out.mkdir()
        make_roster(out, archive=self.archive, settings=self.settings, model=self.model(number), keys=keys)
        return out

    def read(self, roster: Path) -> Roster:
        return read_roster(roster, self.masking, self.signers)

    def plain(self, name: str, step: make.Tensors, number: int = 0, second: Second | None = None) -> Path:
        """What training leaves: the model, moved by `step`, and perhaps second moments."""
        base = self.model(number)
        moved = {key: value.float() + step[key] for key, value in make.read_all(base).items()}
        path = make.update(self.place("plain"), moved, base=base, facility=name, tokens=self.tokens.get(name, 100))
        if second is not None:
            write_factors(path, second, steps=10.0 * (number + 1), kept=self.kept if number else 0.0)
            write_manifest(path, read_manifest(path))
        with_run(path, run_of(read_manifest(base)))
        return path

    def masked(self, name: str, roster: Path, plain: Path, number: int = 0) -> Path:
        """The masking of one facility's job."""
        out = self.place("update")
        member = PrivateKeys(state=self.state(name)).of(self.read(roster), name)
        mask_update(
            plain,
            received=self.model(number),
            out=out,
            residual_out=out.with_name("residual"),
            member=member,
            settings=self.masking,
            seed=self.settings.seed,
        )
        return out

    def receive(self, name: str, update: Path | None, number: int = 0) -> Path:
        """The receive step of one facility; returns what it hands on."""
        settings = self.settings
        failure = receive(
            update,
            Expected(
                facility=name,
                round=number,
                model=self.model(number),
                evaluation=False,
                settings=AggregationSettings(),
                masks=settings.masks,
                moments=self.masking.moments_due(number),
                adapters=settings.lora,
            ),
        )
        if failure is None:
            assert update is not None
            return update
        out = self.place("failure")
        with new_directory(out) as temporary:
            report.write(temporary, failure)
        return out

    def settle(self, roster: Path, received: dict[str, Path], number: int = 0) -> Path:
        """The step `survivors`; `received`: what the receive steps handed on."""
        out = self.place("request")
        settle(self.collected(received, number), roster=roster, out=out)
        return out

    def collected(self, received: dict[str, Path], number: int) -> CollectedRound:
        """The round with what was received of it."""
        return CollectedRound(
            archive=self.archive,
            settings=self.settings,
            model=self.model(number),
            number=number,
            arrived=self.arrived(received, number),
        )

    def arrived(self, received: dict[str, Path], number: int = 0):
        """Everyone's directories, sorted out; who has none is absent."""
        everything = [received.get(name) or self.receive(name, None, number) for name in self.names]
        return sort_out(everything, self.names, number)

    def answer(self, name: str, request: Path, *, signer: str | None = None) -> Path:
        """The step `unmask` of one facility. Raises `InputError`."""
        answer = answer_request(request, facility=name, settings=self.masking, state=self.state(name), rules=self.rules)
        out = self.place("answer")
        with new_directory(out) as temporary:
            write_answer(temporary, answer, self.signers.parent / (signer or name))
        return out

    def close(self, request: Path, received: dict[str, Path], answers: Sequence[Path], number: int = 0):
        return close_masked_round(self.collected(received, number), request=request, answers=answers)

    def round(
        self,
        steps: dict[str, make.Tensors],
        number: int = 0,
        *,
        lost: dict[str, str] | None = None,
        second: Mapping[str, Second] | None = None,
    ) -> tuple[Path, int, bool]:
        """A whole round. `lost`: facilities by the phase that they do not live to see (keys, train, unmask).

        `second`: second moments by facility.
        """
        lost = lost or {}
        keyed = [name for name in self.names if lost.get(name) != "keys"]
        roster = self.roster([self.keys(name, number) for name in keyed], number)
        trained = [name for name in keyed if lost.get(name) != "train"]
        received = {
            name: self.receive(
                name,
                self.masked(name, roster, self.plain(name, steps[name], number, (second or {}).get(name)), number),
                number,
            )
            for name in trained
        }
        request = self.settle(roster, received, number)
        asked = read_request(request).survivors
        there = [name for name in keyed if lost.get(name) not in ("train", "unmask")] if asked else []
        return self.close(request, received, [self.answer(name, request) for name in there], number)

    def roster_of(self, roster: Path) -> Roster:
        return open_roster(roster, self.settings)


def steps(names: Sequence[str], seed: int = 0, scale: float = 1e-3) -> dict[str, make.Tensors]:
    """A step of each facility: normal values of that size."""
    return {
        name: make.random_tensors(100 * seed + i, SHAPES, torch.float32, scale) for i, name in enumerate(sorted(names))
    }


def mean_of(steps: dict[str, make.Tensors], weights: dict[str, float]) -> make.Tensors:
    """The weighted mean in float64."""
    total = sum(weights.values())
    return {
        key: sum(steps[name][key].double() * (weight / total) for name, weight in weights.items()) for key in SHAPES
    }


def moved(federation: Masking, number: int) -> make.Tensors:
    """What round `number` made of the model, in float64; from the float32 masters."""
    before = make.read_all(federation.model(number))
    after = make.read_all(federation.archive.round_directory(number) / "state" / "master")
    return {key: after[key].double() - before[key].double() for key in SHAPES}


def error(found: make.Tensors, wanted: make.Tensors, against: make.Tensors | None = None) -> float:
    """Root mean square of the difference, over that of `against` (default: what is wanted)."""
    lost = sum(float(((found[key] - wanted[key]) ** 2).sum()) for key in wanted)
    whole = sum(float((value.double() ** 2).sum()) for value in (against or wanted).values())
    return (lost / whole) ** 0.5

"""Perplexity after rounds with secure aggregation beside the same rounds without, as JSON; a pico model really trained.

    python -m tests.bench.masking_quality [--rounds 5] [--steps 20] [--seeds 3] [--bits 16]

Three facilities whose text differs; both federations begin from the same weights, draw the same batches and keep their
facilities' AdamW moments. Masked rounds go through keys, masks, answers and the aggregation's own pass, and what fixed
point leaves of a step is added to the facility's next first weights, as in the product.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from tests.aggregation import make
from tests.bench.asked import at_least
from tests.masking.federation import Masking, ssh_keys
from tests.pico import save_pico

NAMES = ("alpha", "beta", "gamma")
BLOCK, VOCABULARY, BATCH, RATE = 32, 128, 8, 3e-3


class FromPico(Masking):
    """A federation that begins with a pico model."""

    def __post_init__(self) -> None:
        self.archive = Archive(self.root / "archive")
        self.archive.begin(self.root.parent / "pico", "test")


class Trainer:
    """One facility: its text, its moments."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.random = torch.Generator().manual_seed(1000 * seed + number)
        self.moments: dict[int, dict[str, torch.Tensor]] = {}

    def batch(self, count: int) -> torch.Tensor:
        """Sequences that count upwards, by steps and with noise of this facility's own."""
        first = torch.randint(VOCABULARY, (count, 1), generator=self.random)
        noise = torch.rand((count, BLOCK), generator=self.random) < 0.05 * (self.number + 1)
        tokens = (first + (self.number + 1) * torch.arange(BLOCK)) % VOCABULARY
        return torch.where(noise, torch.randint(VOCABULARY, (count, BLOCK), generator=self.random), tokens)

    def train(self, model: Path, unsent: make.Tensors, steps: int) -> make.Tensors:
        """The step from the received model, in float32."""
        base = {name: tensor.float() for name, tensor in make.read_all(model).items()}
        net = load(model)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if name in unsent:
                    parameter += unsent[name]
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
        if self.moments:
            optimizer.load_state_dict(optimizer.state_dict() | {"state": self.moments})
        for _ in range(steps):
            tokens = self.batch(BATCH)
            optimizer.zero_grad()
            net(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        self.moments = optimizer.state_dict()["state"]
        trained = {name: parameter.detach() for name, parameter in net.named_parameters()}
        return {name: trained[name] - tensor for name, tensor in base.items()}


def load(model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def perplexity(model: Path) -> float:
    """Over held-out text of all facilities alike."""
    net = load(model)
    with torch.no_grad():
        losses = [
            float(net(input_ids=tokens, labels=tokens).loss)
            for number in range(len(NAMES))
            for tokens in [Trainer(number, 999).batch(64)]
        ]
    return math.exp(sum(losses) / len(losses))


def masked_federation(root: Path, signers: Path, rounds: int, steps: int, seed: int, bits: int) -> float:
    federation = FromPico(
        root=root, signers=signers, names=NAMES, bits=bits, largest_step=2 * steps * RATE, changes={"rounds": rounds}
    )
    trainers = {name: Trainer(number, seed) for number, name in enumerate(NAMES)}
    unsent: dict[str, make.Tensors] = {name: {} for name in NAMES}
    for number in range(rounds):
        roster = federation.roster([federation.keys(name, number) for name in NAMES], number)
        received = {}
        for name in NAMES:
            step = trainers[name].train(federation.model(number), unsent[name], steps)
            received[name] = federation.masked(name, roster, federation.plain(name, step, number), number)
            unsent[name] = make.read_all(received[name].with_name("residual"))
        request = federation.settle(roster, received, number)
        federation.close(request, received, [federation.answer(name, request) for name in NAMES], number)
    return perplexity(federation.model(rounds))


def plain_federation(root: Path, rounds: int, steps: int, seed: int) -> float:
    archive = Archive(root / "archive")
    archive.begin(root.parent / "pico", "test")
    trainers = {name: Trainer(number, seed) for number, name in enumerate(NAMES)}
    base, state = archive.model_for(0), None
    settings = AggregationSettings(rule="mean", **make.UNBOUNDED, screen={"action": "off"})  # type: ignore[arg-type]
    for number in range(rounds):
        updates = {}
        for name in NAMES:
            step = trainers[name].train(base, {}, steps)
            moved = {key: value.float() + step[key] for key, value in make.read_all(base).items()}
            updates[name] = make.update(root / f"{number}-{name}", moved, base=base, facility=name)
        out, after = root / f"model-{number}", root / f"state-{number}"
        aggregate(Request(base=base, updates=updates, out=out, settings=settings, state_in=state, state_out=after))
        base, state = out, after
    return perplexity(base)


def measure(root: Path, rounds: int, steps: int, seeds: int, bits: int) -> dict[str, object]:
    signers = ssh_keys(root / "keys", NAMES)
    rows = []
    for seed in range(seeds):
        place = root / f"seed-{seed}"
        place.mkdir()
        save_pico(place / "pico", seed=seed, dtype="bfloat16")
        before = perplexity(place / "pico")
        plain = plain_federation(place / "plain", rounds, steps, seed)
        masked = masked_federation(place / "masked", signers, rounds, steps, seed, bits)
        rows.append(
            {
                "seed": seed,
                "perplexity_before": before,
                "plain": plain,
                "masked": masked,
                "masked_over_plain": masked / plain,
            }
        )
    return {"rounds": rounds, "steps": steps, "bits": bits, "facilities": len(NAMES), "runs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(1), default=20, help="optimizer steps a round (default 20)")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--bits", type=int, choices=(16, 32), default=16)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="crossfed-bench-") as folder:
        found = measure(Path(folder), arguments.rounds, arguments.steps, arguments.seeds, arguments.bits)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

"""Law: what masks leave of noised updates is the mean that plain loops make. Oracle: each facility's round in plain
torch, with the same secret stream: its sample, clipped gradients one by one, noise once, AdamW; then the mean."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from coordinator.archive.rounds import Archive
from facility.exchange.checkpoints.adapters import PREFIX
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import read_manifest, run_of, with_run
from facility.exchange.messages.privacy import privacy_of
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.privacy.accounting import Releases, epsilon_of
from facility.training.privacy.randomness import SecretRandom
from tests.aggregation import make
from tests.masking.federation import Masking
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import run_rounds

NAMES = ("alpha", "beta", "gamma")
UNITS, STEPS, BATCH, RATE, CLIP, SEED = 40, 3, 8, 2e-3, 0.5, 7
FROZEN = {"rank": 4, "alpha": 8, "freeze_a": True, "targets": ["q_proj", "down_proj"]}


class Private(Masking):
    """Its facilities train a real model."""

    def __post_init__(self) -> None:
        self.archive = Archive(self.root / "archive")
        self.archive.begin(save_pico(self.root / "initial", dtype="float32"), "test")


def key_of(name: str) -> bytes:
    return name.encode().ljust(32)


def train(federation: Private, name: str, dataset: Path, lora: dict[str, Any], patch: pytest.MonkeyPatch) -> Path:
    """The round of one facility, by the trainer, whose secret key is known here."""
    begin = SecretRandom.__init__
    training = {"steps": STEPS, "batch_sequences": BATCH, "learning_rate": RATE, "schedule": "constant", "lora": lora}
    training |= {"warmup_steps": 0, "export_dtype": "float32", "threads": 1, "device": "cpu"}
    budget = {"epsilon": 8.0, "delta": 1e-3, "unit": "block", "clip": CLIP}
    settings = {"federation": "test", "facility": name, "rounds": 2, "seed": SEED}
    place = federation.place("private")
    file = place.with_name("settings.json")
    file.write_text(json.dumps(settings | {"training": training, "differential": budget}))
    words = {"model": federation.model(), "dataset": dataset, "settings": file, "round": 0}
    words |= {"out": place, "state": place.with_name("state")}
    with patch.context() as secret:
        secret.setattr(SecretRandom, "__init__", lambda self, key=None: begin(self, key_of(name)))
        secret.chdir(place.parent)
        ((_, code, said),) = run_rounds(0, 1, [(name, [str(one) for k, v in words.items() for one in (f"--{k}", v)])])
    assert code == 0, said
    with_run(place, run_of(read_manifest(federation.model())))
    return place


def plain_model(model: Path, lora: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """The model in plain transformers (and peft), and by stored name what an update holds of it."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not lora:
        return net, dict(net.named_parameters())
    adapters = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=lora["targets"])
    inject_adapter_in_model(adapters, net)
    named = {PREFIX + k.replace(".default.", "."): p for k, p in net.named_parameters() if "lora_" in k}
    for stored, parameter in named.items():
        begun = np.array(begun_factor(SEED, stored, tuple(parameter.shape)))
        parameter.data = torch.from_numpy(begun).view(parameter.shape).float()
    return net, named


def samples(random: SecretRandom, blocks: np.ndarray) -> Iterator[np.ndarray]:
    """The blocks of each step, as a secret stream draws them, after the noise of the received model's loss."""
    random.normal(1)
    for _ in range(STEPS):
        yield blocks[np.flatnonzero(random.uniform(UNITS) < BATCH / UNITS)].astype("int64")


def replay(model: Path, name: str, dataset: Path, noise: float, lora: dict[str, Any]) -> dict[str, np.ndarray]:
    """A facility's round as a plain loop."""
    net, named = plain_model(model, lora)
    held = [key for key in named if lora and "lora_A" in key]
    trained = {key: one.requires_grad_() for key, one in named.items() if key not in held}
    known, random = TrainingSettings(), SecretRandom(key_of(name))
    decays = [
        {"params": [one for one in trained.values() if (one.dim() > 1) == matrices], "weight_decay": decay}
        for matrices, decay in ((True, known.weight_decay), (False, 0.0))
    ]
    groups = [group for group in decays if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(known.beta1, known.beta2), eps=known.epsilon)
    for sample in samples(random, np.load(dataset / "train.npy")):
        random.seed()  # of dropout, which this model has not
        total = {key: torch.zeros_like(one) for key, one in trained.items()}
        for ids in map(torch.from_numpy, sample):
            loss = F.cross_entropy(net(input_ids=ids[None]).logits[0, :-1], ids[1:])
            found = torch.autograd.grad(loss, list(trained.values()))
            norm = math.sqrt(sum(one.double().square().sum().item() for one in found))
            for whole, one in zip(total.values(), found, strict=True):
                whole += one * min(1.0, CLIP / norm)
        for key, one in named.items():  # drawn for what is held, too, and not used
            drawn = torch.from_numpy(random.normal(one.numel())).view(one.shape) * noise * CLIP
            if key in total:
                total[key] = (total[key].double() + drawn).float() / BATCH
        norm = math.sqrt(sum(one.double().square().sum().item() for one in total.values()))
        for key, one in trained.items():
            one.grad = total[key] * min(1.0, known.clip_norm / norm)
        optimizer.step()
    return {key: one.detach().double().numpy() for key, one in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "lost"), [({}, "gamma"), (FROZEN, "gamma"), (FROZEN, "")], ids=["full", "frozen-a", "all"]
)
def test_the_unmasked_sum_is_the_mean_of_noised_plain_loops(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any], lost: str
):
    """`alpha` counts twice; the facility `lost` has keys in the roster, and its update never comes."""
    changes: dict[str, Any] = {"seed": SEED} | ({"lora": LoraSettings(**lora)} if lora else {})
    federation = Private(
        root=tmp_path, signers=signers, bits=32, largest_step=0.05, tokens={"alpha": 200}, changes=changes
    )
    model, plain, made = federation.model(), {}, {}
    for number, name in enumerate(NAMES):
        dataset = write_dataset(tmp_path / "data" / name, train=UNITS, seed=number)
        made[name] = train(federation, name, dataset, lora, monkeypatch)
        told = privacy_of(read_report(made[name]).details)
        assert told is not None
        spent = Releases(count=STEPS, noise_multiplier=told.noise_multiplier, sampling_rate=BATCH / UNITS)
        assert told.steps == STEPS and told.spent == epsilon_of([spent], told.delta)
        plain[name] = replay(model, name, dataset, told.noise_multiplier, lora)
    roster = federation.roster([federation.keys(name) for name in NAMES])
    there = [name for name in NAMES if name != lost]
    received = {name: federation.receive(name, federation.masked(name, roster, made[name])) for name in there}
    request = federation.settle(roster, received)
    federation.close(request, received, [federation.answer(name, request) for name in there])
    found = make.read_all(federation.archive.round_directory(0) / "state" / "master")
    weights = {name: 2.0 if name == "alpha" else 1.0 for name in there}
    for key in plain["alpha"]:
        mean = sum(weight * plain[name][key] for name, weight in weights.items()) / sum(weights.values())
        assert np.abs(found[key].double().numpy() - mean).max() < 5e-7, key

"""One family, one task: the trainer's first step against a plain step of transformers' own model with the same data."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import shutil
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from facility.exchange.checkpoints.image_processor import FILE
from facility.exchange.errors import CrossFedError
from facility.training.data.tasks import IGNORED, Batch
from facility.training.engine import Engine
from tests.training.images import CLASSES, PROCESSOR, processor_of
from tests.training.layouts import arguments
from tests.training.shrink import SIDE, tiny, tiny_image

LARGEST = 3_000_000
"""Parameters of a model that counts as tiny."""
LARGEST_OF_IMAGES = 30_000_000
SAME = 2e-5
"""Largest difference of a weight after one step, of a step of 1e-2."""
RATE, EPSILON = 1e-2, 1e-2
"""An epsilon far above rounding: AdamW's first step is else the sign of a gradient."""
TRAINING: dict[str, Any] = {
    "steps": 1,
    "learning_rate": RATE,
    "epsilon": EPSILON,
    "schedule": "constant",
    "clip_norm": 0.0,
}
FACTORIES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classes": "AutoModelForSequenceClassification",
    "images": "AutoModelForImageClassification",
}
SHARES = (8, 4, 2, 1)
"""By how much the widths of image families are divided: by the first with which the model runs."""


class NotTiny(Exception):
    """A family that the rules do not make small, or that needs other input than token ids."""


@dataclass(frozen=True)
class Verdict:
    """`works`, `refused`, `needs` (not tried), or `wrong`; and why."""

    word: str
    reason: str = ""


def factory(task: str) -> Any:
    import transformers

    return getattr(transformers, FACTORIES[task])


def families(task: str) -> list[str]:
    """Families of which transformers has a model for the task, by `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(set(factory(task)._model_mapping._model_mapping) & set(CONFIG_MAPPING_NAMES))


def save_image_family(directory: Path, family: str) -> Path:
    """Write the family's tiny image classifier. Raises `NotTiny`."""
    error: Exception = NotTiny("")
    for share in SHARES:
        try:
            config = tiny_image(family, share, num_labels=len(CLASSES), id2label=dict(enumerate(CLASSES)))
            config.architectures = []  # of a family with several classifiers, transformers looks there
            torch.manual_seed(0)
            model = factory("images").from_config(config).float()
            model.train()(pixel_values=torch.randn(2, 3, SIDE, SIDE))
        except Exception as found:
            error = found
            continue
        if (count := sum(one.numel() for one in model.parameters())) > LARGEST_OF_IMAGES:
            raise NotTiny(f"the tiny one still has {count:,} parameters")
        torch.manual_seed(0)
        factory("images").from_config(config).float().save_pretrained(directory)
        (directory / FILE).write_text(json.dumps(processor_of(SIDE)))
        return directory
    raise NotTiny(sentence(error)) from error


def save_family(directory: Path, task: str, family: str) -> Path:
    """Write the family's tiny model. Raises `NotTiny`."""
    if task == "images":
        return save_image_family(directory, family)
    try:
        config = tiny(family, is_decoder=task == "causal", num_labels=3, pad_token_id=0)
        made = factory(task)
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(one.numel() for one in made.from_config(config).parameters())
        if count > LARGEST:
            raise NotTiny(f"the tiny one still has {count:,} parameters")
        config = tiny(family, is_decoder=task == "causal", num_labels=3, pad_token_id=0)
        config.use_cache = False
        model = made.from_config(config).float()
        model.save_pretrained(directory)
        model(input_ids=torch.ones(2, 16, dtype=torch.int64))
    except NotTiny:
        raise
    except Exception as error:
        raise NotTiny(sentence(error)) from error
    return directory


def dataset_for(task: str, model: Path, datasets: dict[str, Path]) -> Path:
    """The dataset of a task; classifiers that read the last end-of-text token get rows that end in one."""
    ended = task == "classes" and json.loads((model / "config.json").read_text()).get("is_encoder_decoder")
    return datasets["ended" if ended else task]


def sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextlib.contextmanager
def recorded() -> Iterator[list[Batch]]:
    """The batches of the trainer's steps, as its engine is given them."""
    found: list[Batch] = []
    original = Engine.step

    def step(self: Engine, batches: list[Batch], *more: Any) -> Any:
        found.extend(batches)
        return original(self, batches, *more)

    Engine.step = step  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Engine.step = original  # type: ignore[method-assign]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No log lines and warnings; signals and torch's settings are put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def verdict(place: Path, task: str, family: str, datasets: dict[str, Path], *, lora: bool = False) -> Verdict:
    """Train one step of the family's tiny model, and compare."""
    from facility.train import main

    shutil.rmtree(place, ignore_errors=True)
    with quiet():
        try:
            model = save_family(place / "model", task, family)
        except NotTiny as error:
            return Verdict("needs", str(error))
        training = TRAINING | ({"lora": {"rank": 4}} if lora else {})
        try:
            with recorded() as batches:
                code = main(arguments(place / "round", model, dataset_for(task, model, datasets), **training))
        except CrossFedError as error:
            return Verdict("refused", str(error))
        except Exception as error:
            return Verdict("wrong", f"ends in a traceback: {sentence(error)}")
        if code:
            return Verdict("wrong", f"ends with {code}")
        if task == "causal" and sees_ahead(place / "model"):
            return Verdict("wrong", "trains although it sees the tokens that it is to predict")
        try:
            apart = (adapters_apart if lora else weights_apart)(place, task, batches)
        except Exception as error:
            return Verdict("wrong", f"the update does not load: {sentence(error)}")
    if not apart < SAME:
        return Verdict("wrong", f"weights differ by {apart:.1e}")
    return Verdict("works")


def sees_ahead(model: Path) -> bool:
    """Whether an early position's logits change with a later token."""
    found = factory("causal").from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.arange(2, 18)[None]
    other = ids.clone()
    other[:, 8:] += 50
    with torch.no_grad():
        one, two = (found(input_ids=given, use_cache=False).logits[:, :8] for given in (ids, other))
    return bool((one - two).abs().max() > 1e-4)


def plain_step(model: Any, parameters: Any, batches: list[Batch]) -> None:
    """One step of AdamW on the mean loss over all predictions."""
    model.train()
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0)
    predictions = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
    for batch in batches:
        inputs = dict(batch.inputs)
        if "pixel_values" in inputs:
            dtype = next(model.parameters()).dtype
            mean, std = (torch.tensor(PROCESSOR[name]).view(-1, 1, 1) for name in ("image_mean", "image_std"))
            scaled = (inputs["pixel_values"].float() * PROCESSOR["rescale_factor"] - mean) / std
            inputs["pixel_values"] = scaled.to(dtype)
        logits = model(**inputs, use_cache=False).logits if takes_cache(model) else model(**inputs).logits
        targets = batch.targets.reshape(-1)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, ignore_index=IGNORED, reduction="sum")
        (loss / predictions).backward()
    optimizer.step()


def takes_cache(model: Any) -> bool:
    return bool(getattr(model.config, "use_cache", None))


def weights_apart(place: Path, task: str, batches: list[Batch]) -> float:
    """Largest difference between the update, as `from_pretrained` loads it, and a plain step.

    Of image families less twice what rounding does to the plain step: batch norms over four numbers make much of it.
    """
    load = factory(task).from_pretrained
    model, update = load(place / "model", dtype=torch.float32), load(place / "round" / "out", dtype=torch.float32)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    plain_step(model, model.parameters(), batches)
    expected, found = model.state_dict(), update.state_dict()
    if expected.keys() != found.keys():
        return float("inf")
    if all(torch.equal(before[name], found[name]) for name in found):
        return float("inf")
    apart = largest(expected, found)
    if task == "images" and apart >= SAME:
        precise = load(place / "model", dtype=torch.float64)
        plain_step(precise, precise.parameters(), batches)
        apart = max(0.0, apart - 2 * largest(precise.state_dict(), expected))
    return apart


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(
        float((one[name].double() - other[name].double()).abs().max())
        for name in one
        if one[name].numel() and not name.endswith("num_batches_tracked")
    )


def adapters_apart(place: Path, task: str, batches: list[Batch]) -> float:
    """The same of adapters, as peft loads them: B begins at zero, so A has not moved in one step."""
    from peft import PeftModel

    update = place / "round" / "out"
    base = factory(task).from_pretrained(place / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, update, is_trainable=True)
    trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
    expected = {name: one.detach().clone() for name, one in trained.items()}
    plain = factory(task).from_pretrained(place / "model", dtype=torch.float32)
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, one in trained.items():
            if ".lora_B." in name:
                one.zero_()
            elif ".lora_A." not in name:
                one.copy_(own[name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")])
    plain_step(adapted, trained.values(), batches)
    return max(float((expected[name] - one).abs().max()) for name, one in trained.items())

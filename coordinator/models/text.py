"""An initial text model in the form that a federation sends: causal, masked, or a classifier, whose head may be new."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.models.published import (
    check_finite,
    check_problem,
    check_weights,
    file_of,
    load_published,
    published_summary,
)
from facility.exchange.checkpoints.families import why_untrainable
from facility.exchange.checkpoints.tokenizer import WHOLE, check_loads
from facility.exchange.errors import InputError
from facility.exchange.panics import panics_refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a text model predicts."""

    suffix: str
    """How the names of its classes in transformers end."""
    title: str
    """In a sentence, with its article."""

    @property
    def factory(self) -> str:
        """The name of what loads it in transformers."""
        return f"AutoModel{self.suffix}"


CAUSAL = Kind(suffix="ForCausalLM", title="a causal language model")
MASKED = Kind(suffix="ForMaskedLM", title="a masked language model")
CLASSIFIER = Kind(suffix="ForSequenceClassification", title="a sequence classifier")


def kind_of(config: Any, classes: Sequence[str]) -> Kind:
    """What config.json says the model is (without a word: causal); with `classes`, it becomes a classifier.

    `config`: transformers' of the source; None: it could not be read, which loading it then reports.
    """
    if classes:
        return CLASSIFIER
    named = [str(name) for name in getattr(config, "architectures", None) or ()]
    return next((kind for kind in (CLASSIFIER, MASKED) if any(name.endswith(kind.suffix) for name in named)), CAUSAL)


def save_text_model(source: str, out: Path, *, kind: Kind, dtype: str, revision: str, classes: Sequence[str]) -> str:
    """Fill the directory `out` with the model and its tokenizer, and try both; returns what was done.

    `classes`: give it a head for these, random where the source has none for as many. Raises `InputError` for a source
    that is none, `TransientError` when the hub cannot be reached.
    """
    from transformers import AutoTokenizer

    model, fresh = loaded(source, kind, dtype=dtype, revision=revision, classes=classes)
    if reason := why_untrainable(model.config, causal=kind is CAUSAL):
        raise InputError(f"{source} cannot be trained: {reason}")
    check_tokenizer(source, revision)
    with panics_refused(f"the tokenizer of {source}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
        except (OSError, ValueError, ImportError):
            log.warning("%s has no tokenizer beside it; facilities need one for facility.prepare", source)
        else:
            if kind is CLASSIFIER:
                fill(model, tokenizer)
            tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    evaluate(out, source, kind)
    return published_summary(out, dtype=dtype, new_classes=len(classes) if fresh else 0)


def check_tokenizer(source: str, revision: str) -> None:
    """Raise `InputError` for a tokenizer.json of the source, if it has one, that takes too much to be loaded."""
    if (file := file_of(source, WHOLE, revision)) is not None:
        check_loads(file)


def loaded(source: str, kind: Kind, *, dtype: str, revision: str, classes: Sequence[str]) -> tuple[Any, bool]:
    """The model, and whether its head is new. Raises `InputError`, `TransientError`."""
    import transformers

    factory = getattr(transformers, kind.factory)
    model, found = load_published(factory, source, kind=kind.title, dtype=dtype, revision=revision, classes=classes)
    new = sorted({*found["missing_keys"], *(str(item[0]) for item in found.get("mismatched_keys", ()))})
    advice = f"take a checkpoint of the whole {kind.title.partition(' ')[2]}"
    advice += ", or give --classes" if kind is CLASSIFIER and not classes else ""
    check_weights(source, [name for name in new if not (classes and of_the_head(model, name))], advice)
    if kind is CLASSIFIER:
        check_problem(source, model.config)
    return model, bool(new)


def of_the_head(model: Any, name: str) -> bool:
    """Whether a tensor belongs to what a new set of classes replaces: all but the model below, and its pooler."""
    return not name.startswith(model.base_model_prefix + ".") or "pooler" in name.split(".")


def fill(model: Any, tokenizer: Any) -> None:
    """Name the token that fills rows, as `facility.prepare` chooses it, where config.json names none.

    A decoder that classifies finds a text's last token by it.
    """
    config = model.config.get_text_config()
    token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if getattr(config, "pad_token_id", None) is None and token is not None:
        config.pad_token_id = int(token)


def evaluate(directory: Path, source: str, kind: Kind) -> None:
    """Evaluate the saved model on eight tokens. Raises `CheckpointError` for values that are not finite."""
    import torch
    import transformers

    model = getattr(transformers, kind.factory).from_pretrained(directory, dtype="auto").eval()
    config = model.config.get_text_config()
    ids = torch.arange(8).reshape(1, 8) % config.vocab_size
    end = getattr(config, "eos_token_id", None)
    if kind is CLASSIFIER and model.config.is_encoder_decoder and isinstance(end, int):
        ids = torch.where(ids == end, (end + 1) % config.vocab_size, ids)  # it pools the text's one end token
        ids[0, -1] = end
    with torch.no_grad():
        check_finite(source, model(ids).logits)

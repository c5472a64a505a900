"""What a round receives, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.dataset import PreparedDataset
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.tokenizer import differ, tokenizer_digest
from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.messages import manifest as manifests
from facility.exchange.messages.settings import FacilitySettings
from facility.preparing.tokenizer import load_tokenizer
from facility.training.parallel.ranks import Ranks


def read_model(
    directory: Path, round: int, ranks: Ranks, *, evaluation: bool
) -> tuple[Checkpoint, manifests.Manifest | None]:
    """Open the received model; where it carries a manifest, the first rank checks every byte against it.

    A federation that ended early has its final model, of an earlier round, evaluated.
    """
    base = None
    if (directory / manifests.NAME).is_file():
        base = manifests.verify_manifest(directory) if ranks.first else manifests.read_manifest(directory)
        if base.kind != "model":
            raise ManifestError(f"{directory} is an {base.kind}, expected a model")
        if base.round != round and not evaluation:
            raise ManifestError(f"{directory} is the model of round {base.round}, expected round {round}")
    return open_checkpoint(directory), base


def check_inputs(round: int, out: Path, settings: FacilitySettings, dataset: PreparedDataset, config: Any) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not 0 <= round <= settings.rounds:
        raise ConfigurationError(
            f"--round is {round}, the federation has rounds 0 to {settings.rounds - 1} (and {settings.rounds} to evaluate)"
        )
    if out.exists():
        raise ConfigurationError(f"--out {out} exists already; remove it or choose another name")
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and dataset.manifest.vocabulary_size > vocabulary:
        raise InputError(
            f"{dataset.directory} was tokenised with a vocabulary of {dataset.manifest.vocabulary_size}, the model has "
            f"{vocabulary} entries: prepare the dataset with the model's own tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and dataset.manifest.block_tokens > longest:
        raise InputError(
            f"{dataset.directory} has blocks of {dataset.manifest.block_tokens} tokens, the model takes at most "
            f"{longest} positions: prepare shorter blocks"
        )


def check_vocabulary(model: Path, dataset: PreparedDataset) -> None:
    """Refuse a dataset whose ids mean other text than the model's, though there may be as many of them.

    The digests of both tokenizers decide; where they cannot be compared (read from files of other names, or not known),
    the tokens of every id do. A model that carries no tokenizer cannot be asked.
    """
    ours, theirs = dataset.manifest.tokenizer_sha256, tokenizer_digest(model)
    if theirs in (None, ours):
        return
    entries = _unlike_entries(dataset.tokenizer_directory, model) if dataset.tokenizer_directory.is_dir() else []
    if not entries and not differ(ours, theirs):
        return
    token, number = entries[0] if entries else ("", 0)
    how = (
        f"{len(entries)} entries differ, for instance {token!r} = {number} is in one only"
        if entries
        else "the same tokens, merged otherwise"
    )
    raise InputError(
        f"{dataset.directory} was tokenised with another vocabulary than that of {model}: {how} ({ours} against {theirs}); "
        "prepare the dataset with the model's own tokenizer"
    )


def _unlike_entries(one: Path, other: Path) -> list[tuple[str, int]]:
    """(token, id) that only one of two tokenizers has, by id."""
    first, second = (set(load_tokenizer(directory).get_vocab().items()) for directory in (one, other))
    return sorted(first ^ second, key=lambda pair: (pair[1], pair[0]))

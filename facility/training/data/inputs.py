"""What a round receives, checked before anything is loaded."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from facility.dataset import IMAGES, PreparedDataset, open_dataset
from facility.exchange.checkpoints.base_model import check_base
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.image_processor import image_processor_digest
from facility.exchange.checkpoints.tokenizer import tokenizer_digest, tokenizers_differ
from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.files.storage import refuses_writes
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages import manifest as manifests
from facility.exchange.messages.settings import FacilitySettings
from facility.preparing.tokenizer import load_tokenizer
from facility.training.data.documents import check_positions
from facility.training.data.images import check_processor, image_task, positions_of
from facility.training.data.preference import Preference
from facility.training.data.tasks import Task, task_for
from facility.training.model import Attention, choose_attention, count_blocks, positions_in, read_config
from facility.training.processes.ranks import Ranks
from facility.training.request import RoundRequest


@dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What a round starts from, opened and checked; no weight has been read."""

    received: Checkpoint
    base: manifests.Manifest | None
    """The received model's manifest, where it carries one."""
    unverified: dict[str, StreamedDigest]
    """Files of the received model whose bytes are still to be compared with the manifest, by `load_weights`, as it
    reads them: what was verified is what is trained."""
    checkpoint: Checkpoint
    """What the frozen and initial weights are loaded from: the received model, or `training.lora.base`."""
    dataset: PreparedDataset
    config: Any
    """The model's transformers configuration."""
    task: Task
    attention: Attention
    blocks: int
    """Repeated blocks of the model."""

    @property
    def base_sha256(self) -> str:
        """Digest of the received model; empty where it carries no manifest."""
        return self.base.content_sha256 if self.base else ""

    @property
    def block_tokens(self) -> int:
        """What a sequence counts in reports: its tokens; 1 for an image."""
        return self.dataset.manifest.block_tokens

    @property
    def positions(self) -> int:
        """Positions that the model computes of one sequence: its tokens, or the patches of an image."""
        images = self.dataset.manifest.task == IMAGES
        return positions_of(self.config) if images else self.block_tokens


def read_inputs(request: RoundRequest, ranks: Ranks) -> RoundInputs:
    """Open the model and the dataset, refuse what cannot be trained. Raises `InputError`."""
    later = ranks.world == 1
    received, base = read_model(request.model, request.round, ranks, evaluation=request.evaluates_only, later=later)
    base_model = request.base_model
    checkpoint = received if base_model == request.model else open_checkpoint(base_model)
    dataset = open_dataset(request.dataset)
    config = read_config(base_model)
    check_inputs(request.round, request.out, request.settings, dataset, config)
    if ranks.first:
        check_origin(base_model, dataset)
        if expected := request.training.lora.base_sha256:
            check_base(base_model, expected)
    task = task_of(dataset, config, request)
    dtype = getattr(torch, request.training.compute_dtype)
    attention = choose_attention(config, task.factory, ranks.device, dtype, separate=task.separate)
    if task.separate:
        # With differential privacy each is a row of its own, all as long as a block.
        shared = dataset.manifest.block_tokens if request.settings.differential is None else 0
        check_positions(config, task.factory, dataset.manifest.task, shared)
    return RoundInputs(
        received=received,
        base=base,
        unverified=digests_of(request.model, base) if later and base is not None else {},
        checkpoint=checkpoint,
        dataset=dataset,
        config=config,
        task=task,
        attention=attention,
        blocks=count_blocks(config, task.factory, attention),
    )


def task_of(dataset: PreparedDataset, config: Any, request: RoundRequest) -> Task:
    """The task that the dataset was prepared for. Raises `InputError` where the model does not fit it."""
    if dataset.manifest.task == "preference":
        return Preference(request.training.preference)
    if dataset.manifest.task == IMAGES:
        return image_task(dataset, config, request.training.images)
    return task_for(dataset, config)


def check_origin(model: Path, dataset: PreparedDataset) -> None:
    """Refuse a dataset that another tokenizer or image processor made than the model's. Raises `InputError`."""
    if dataset.manifest.task == IMAGES:
        check_processor(dataset, image_processor_digest(model))
    else:
        check_vocabulary(model, dataset)


def read_model(
    directory: Path, round: int, ranks: Ranks, *, evaluation: bool, later: bool
) -> tuple[Checkpoint, manifests.Manifest | None]:
    """Open the received model; where it carries a manifest, the first rank checks every byte against it.

    `later`: tensors are verified by the reading that loads them. A federation that ended early has its final model, of
    an earlier round, evaluated.
    """
    base = None
    if (directory / manifests.NAME).is_file():
        base = manifests.read_manifest(directory)
        if ranks.first:
            manifests.verify_manifest(directory, later=manifests.tensor_files(base) if later else ())
        if base.kind != "model":
            raise ManifestError(f"{directory} is an {base.kind}, expected a model")
        if base.round != round and not evaluation:
            raise ManifestError(f"{directory} is the model of round {base.round}, expected round {round}")
    return open_checkpoint(directory), base


def digests_of(directory: Path, manifest: manifests.Manifest) -> dict[str, StreamedDigest]:
    """What makes the digests of the tensor files of a model as they are read, by name."""
    return {name: manifests.streamed_digest(directory, manifest, name) for name in manifests.tensor_files(manifest)}


def _check_place(out: Path) -> None:
    """Make a folder where `out` is to be, and remove it: else a whole round is trained for nothing. What root may do is
    not known without, in /proc for one."""
    place = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    try:
        os.rmdir(tempfile.mkdtemp(dir=place, prefix=f".{out.name[:40]}."))
    except OSError as error:
        if refuses_writes(error):
            raise
        raise ConfigurationError(
            f"--out {out}: {place} is not a folder in which this account may make one; choose another"
        ) from None


def check_inputs(round: int, out: Path, settings: FacilitySettings, dataset: PreparedDataset, config: Any) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not 0 <= round <= settings.rounds:
        raise ConfigurationError(
            f"--round is {round}, the federation has rounds 0 to {settings.rounds - 1} "
            f"(and {settings.rounds} to evaluate)"
        )
    if os.path.lexists(out):
        raise ConfigurationError(f"--out {out} exists already; remove it or choose another name")
    _check_place(out)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)  # of several parts, that which reads text
    if vocabulary is not None and dataset.manifest.vocabulary_size > vocabulary:
        raise InputError(
            f"{dataset.directory} was tokenised with a vocabulary of {dataset.manifest.vocabulary_size}, the model has "
            f"{vocabulary} entries: prepare the dataset with the model's own tokenizer"
        )
    longest = positions_in(config)
    if 0 < longest < dataset.manifest.block_tokens:
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
    if not entries and not tokenizers_differ(ours, theirs):
        return
    token, number = entries[0] if entries else ("", 0)
    how = (
        f"{len(entries)} entries differ, for instance {token!r} = {number} is in one only"
        if entries
        else "the same tokens, merged otherwise"
    )
    raise InputError(
        f"{dataset.directory} was tokenised with another vocabulary than that of {model}: {how} "
        f"({ours} against {theirs}); prepare the dataset with the model's own tokenizer"
    )


def _unlike_entries(one: Path, other: Path) -> list[tuple[str, int]]:
    """(token, id) that only one of two tokenizers has, by id."""
    first, second = (set(load_tokenizer(directory).get_vocab().items()) for directory in (one, other))
    return sorted(first ^ second, key=lambda pair: (pair[1], pair[0]))

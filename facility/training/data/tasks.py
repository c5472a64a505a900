"""What a model is trained to do: the inputs of a forward pass, its targets, and the loss in nats."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from facility.dataset import LOSS, START, DatasetManifest, PreparedDataset
from facility.exchange.checkpoints.families import why_untrainable
from facility.exchange.checkpoints.task_class import FACTORIES
from facility.exchange.errors import InputError
from facility.exchange.task_words import Task as TaskName
from facility.preparing.tokenizer import load_tokenizer
from facility.training.data.classes import check_classes

ROWS_AT_ONCE = 65536
"""Rows of a dataset that are looked at at once."""
IGNORED = -100
"""Target of a position that counts for nothing (Hugging Face's convention)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of one forward pass."""

    inputs: dict[str, torch.Tensor]
    """Keyword arguments of the model's forward."""
    targets: torch.Tensor
    """One target per prediction; `IGNORED` where none is asked."""
    by_row: int = 0
    """The loss averages over rows, whose targets end in so many values of which the first is never `IGNORED`; 0: over
    predictions."""

    @property
    def predictions(self) -> int:
        """Number of predictions (or rows) that the loss averages over."""
        if self.by_row:
            return int((self.targets[:, -self.by_row] != IGNORED).sum())
        return int((self.targets != IGNORED).sum())


class Task(Protocol):
    """One kind of training."""

    pools: bool
    """True if the head chooses a position by the token ids (the last that is not padding)."""
    separate: bool
    """True if documents share a block without seeing each other."""
    main_input: str
    """The input that a pipeline's first stage takes."""
    answers: bool
    """True if a prediction is right or wrong, so that accuracy is reported."""

    @property
    def factory(self) -> Any:
        """transformers' Auto class of the model."""

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        """The sequences `indices` of a split; `seeds` (one a sequence) is for tasks that draw."""

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over predictions of the cross entropy in float32."""

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model is called with, of inputs that are on its device."""

    def correct(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Number of right answers, where `answers`."""


class TaskDefaults:
    """What most tasks share: token ids in, and the cross entropy of each prediction."""

    name: TaskName = "causal-lm"
    pools = separate = False
    main_input = "input_ids"
    answers = False

    @property
    def factory(self) -> Any:
        import transformers

        return getattr(transformers, FACTORIES[self.name])

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return inputs

    def loss_sum(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy_sum(logits, targets)

    def correct(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(-1) == targets).sum()


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum of cross-entropies in float32; `logits` end in classes, `targets` of `IGNORED` do not count."""
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def token_ids(dataset: PreparedDataset, split: str, indices: np.ndarray) -> torch.Tensor:
    """Blocks of a split as int64, a row each."""
    return torch.from_numpy(np.asarray(dataset.split(split)[indices], dtype=np.int64))


class CausalLM(TaskDefaults):
    """Predict the next token of every token of a block, or of those that the dataset marks."""

    def __init__(self, *, marked: bool = False, separate: bool = False) -> None:
        """`marked`: the dataset says which tokens bear loss; `separate`: documents of a block attend to themselves
        only, and their positions begin anew."""
        self.marked, self.separate = marked, separate

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        ids = token_ids(dataset, split, indices)
        targets = torch.full_like(ids, IGNORED)
        targets[:, :-1] = ids[:, 1:]
        inputs = {"input_ids": ids}
        if self.marked:
            marks = torch.from_numpy(np.array(dataset.marks(split)[indices]))
            borne = (marks & (LOSS | START)) == LOSS  # a document's first token follows from nothing
            targets[:, :-1][~borne[:, 1:]] = IGNORED
            if self.separate:
                inputs["position_ids"] = positions_within(marks & START != 0)
        return Batch(inputs=inputs, targets=targets)


def positions_within(starts: torch.Tensor) -> torch.Tensor:
    """Position of each token in its document, of rows where documents begin at `starts`.

    transformers finds the documents by these positions, as long as there is neither a mask nor a cache.
    """
    place = torch.arange(starts.shape[1]).expand(starts.shape)
    return place - torch.where(starts, place, 0).cummax(dim=1).values


class MaskedLM(TaskDefaults):
    """Predict hidden tokens (Devlin et al. 2018, arXiv 1810.04805, section 3.1): 15 % of the tokens are asked for, of
    which 80 % are replaced by [MASK], 10 % by a random token, 10 % stay."""

    name = "masked-lm"

    def __init__(self, mask_token: int, vocabulary: int, special: tuple[int, ...]) -> None:
        self.mask_token, self.vocabulary, self.special = mask_token, vocabulary, special

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        ids = token_ids(dataset, split, indices)
        targets = torch.full_like(ids, IGNORED)
        for row, seed in enumerate(seeds):
            draw = np.random.Generator(np.random.PCG64(seed))
            chance = torch.from_numpy(draw.random(ids.shape[1]))
            replace = torch.from_numpy(draw.random(ids.shape[1]))
            words = torch.from_numpy(draw.integers(0, self.vocabulary, ids.shape[1]))
            asked = (chance < 0.15) & ~torch.isin(ids[row], torch.tensor(self.special, dtype=torch.int64))
            targets[row, asked] = ids[row, asked]
            ids[row] = torch.where(asked & (replace < 0.8), self.mask_token, ids[row])
            ids[row] = torch.where(asked & (replace >= 0.8) & (replace < 0.9), words, ids[row])
        return Batch(inputs={"input_ids": ids}, targets=targets)


class Classification(TaskDefaults):
    """Name the class of a text or of a pair of texts (MNLI's premise and hypothesis)."""

    name = "classification"
    pools = answers = True

    def __init__(self, *, token_types: bool) -> None:
        self.token_types = token_types

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        ids = token_ids(dataset, split, indices)
        labels, lengths, seconds = np.asarray(dataset.rows(split)[indices], dtype=np.int64).T
        place = torch.arange(ids.shape[1])
        inputs = {"input_ids": ids, "attention_mask": (place < torch.from_numpy(lengths)[:, None]).long()}
        if self.token_types:
            inputs["token_type_ids"] = (place >= torch.from_numpy(seconds)[:, None]).long() * inputs["attention_mask"]
        return Batch(inputs=inputs, targets=torch.from_numpy(labels.copy()))


def check_padding(dataset: PreparedDataset, config: Any, factory: Any) -> None:
    """Refuse a model whose padding token differs from the dataset's, or that needs one and names none."""
    theirs, ours = dataset.manifest.pad_token_id, getattr(config.get_text_config(), "pad_token_id", None)
    if theirs == ours:
        return
    if ours is not None:
        raise InputError(
            f"{dataset.directory} fills its rows with token {theirs}, the model's config.json has pad_token_id {ours}: "
            "prepare the dataset with the model's own tokenizer, or correct pad_token_id"
        )
    if needs_padding_token(config, factory):
        raise InputError(
            "the model classifies by the last token of a text and its config.json has no pad_token_id to find it by: "
            f"make the initial model with pad_token_id={theirs}, which fills the rows of {dataset.directory}"
        )


def check_family(config: Any, *, causal: bool) -> None:
    """Refuse a family that cannot be trained here, with the reason."""
    if reason := why_untrainable(config, causal=causal):
        raise InputError(reason)


def check_end_tokens(dataset: PreparedDataset, config: Any) -> None:
    """Refuse rows that a classifier which reads the last end-of-text token cannot be given.

    transformers' classifiers of encoder-decoders (BART, T5) pool that token, and want as many in every row.
    """
    end = getattr(config.get_text_config(), "eos_token_id", None)
    if not config.is_encoder_decoder or not isinstance(end, int):
        return
    held = {
        int(count)
        for split in dataset.manifest.splits
        for ids in (dataset.split(split),)
        for first in range(0, len(ids), ROWS_AT_ONCE)
        for count in np.unique((np.asarray(ids[first : first + ROWS_AT_ONCE]) == end).sum(axis=1))
    }
    if held and (0 in held or len(held) > 1):
        raise InputError(
            f"a {config.model_type} classifies by a text's last end-of-text token ({end}) and needs as many of them in "
            f"every row; rows of {dataset.directory} hold {', '.join(map(str, sorted(held)))}: prepare the dataset "
            "with the model's own tokenizer, which ends every text with one"
        )


def needs_padding_token(config: Any, factory: Any) -> bool:
    """True if the model refuses a batch of two without a padding token; tried without memory (FakeTensor)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = copy.deepcopy(config)
    config.use_cache = False
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = factory.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        try:
            model(input_ids=torch.ones(2, 4, dtype=torch.int64))
        except ValueError:
            return True
    return False


def task_for(dataset: PreparedDataset, config: Any) -> Task:
    """The task that a dataset was prepared for. Raises `InputError` where the model does not fit it."""
    manifest: DatasetManifest = dataset.manifest
    if manifest.task in ("classification", "masked-lm"):
        check_family(config, causal=False)
    if manifest.task == "classification":
        check_classes(dataset, config)
        task = Classification(token_types=getattr(config, "type_vocab_size", 0) > 1)
        check_padding(dataset, config, task.factory)
        check_end_tokens(dataset, config)
        return task
    if manifest.task == "masked-lm":
        tokenizer = load_tokenizer(dataset.tokenizer_directory)
        if tokenizer.mask_token_id is None:
            raise InputError(f"{dataset.tokenizer_directory} has no mask token: masked language modelling needs one")
        return MaskedLM(tokenizer.mask_token_id, manifest.vocabulary_size, tuple(tokenizer.all_special_ids))
    check_family(config, causal=True)
    return CausalLM(marked=dataset.marked, separate=manifest.documents == "separate")

"""What a federation is compared with: pooled training, each facility by itself, and the base model as it is."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.bench.federated_learner import Curve, Learner, Local, Text, batches, perplexity
from tests.bench.federated_unlike import steps_of, text_of


def pool(
    model: nn.Module,
    texts: dict[str, Text],
    *,
    steps: int,
    local: Local,
    seed: int,
    unlike: str = "",
    span: int = 1,
) -> Curve:
    """One model over all texts with all facilities' batches in every step: the same tokens as the federation.

    `unlike`: in every round of `span` steps, the batches of the facilities that make a step there, of their text.
    """
    feeds = [
        batches(text_of(unlike, number, text, seed).train, local.batch, seed * 1000 + number)
        for number, text in enumerate(texts.values())
    ]

    def joined() -> Iterator[Tensor]:
        for made in range(steps):
            counts = [steps_of(unlike, number, made // span, span) for number in range(len(feeds))]
            yield torch.cat([next(feed) for feed, count in zip(feeds, counts, strict=True) if made % span < count])

    learner = Learner(model, joined(), local, steps)
    learner.train(steps)
    return Curve(rounds=[1], perplexities=[{n: perplexity(learner.model, t.validation) for n, t in texts.items()}])


def alone(model: nn.Module, texts: dict[str, Text], *, steps: int, local: Local, seed: int) -> Curve:
    """Each facility by itself with its own batches and steps; its perplexity on its own validation text."""
    final = {}
    for number, (name, text) in enumerate(texts.items()):
        learner = Learner(model, batches(text.train, local.batch, seed * 1000 + number), local, steps)
        learner.train(steps)
        final[name] = perplexity(learner.model, text.validation)
    return Curve(rounds=[1], perplexities=[final])


def untrained(model: nn.Module, texts: dict[str, Text]) -> Curve:
    """The base model as it is."""
    return Curve(rounds=[0], perplexities=[{name: perplexity(model, text.validation) for name, text in texts.items()}])

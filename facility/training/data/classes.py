"""Do a dataset's classes fit the model's head: as many, under the same names, in the same order?"""

from __future__ import annotations

from typing import Any

from facility.dataset import PreparedDataset
from facility.exchange.checkpoints.labels import ONE_OF_SEVERAL, default_labels, other_problem
from facility.exchange.errors import InputError

ADVICE = "make the initial model with these classes (coordinator.model --classes), or prepare with --classes"


def check_classes(dataset: PreparedDataset, config: Any) -> None:
    """Raise `InputError` where the model's head has another number of classes, other ones, or another order, or is one
    that names no class of an example: the cross entropy would train it to be read as nothing will read it.

    A head whose classes have no names of their own (`LABEL_0`, ...) takes those of any dataset of as many.
    """
    ours = dataset.manifest.classes
    if config.num_labels != len(ours):
        raise InputError(
            f"{dataset.directory} has {len(ours)} classes ({', '.join(ours[:5])}{', ...' * (len(ours) > 5)}), the "
            f"model's head has {config.num_labels}: {ADVICE}"
        )
    if problem := other_problem(vars(config)):
        raise InputError(
            f"config.json of the model has problem_type {problem!r}, {dataset.directory} has one class for each "
            f"example ({ONE_OF_SEVERAL}): what is trained would be read otherwise; {ADVICE.partition(',')[0]}"
        )
    named = [str(config.id2label.get(number, "")) for number in range(config.num_labels)]
    if named == ours or named == default_labels(len(named)):
        return
    number = next(n for n, (their, our) in enumerate(zip(named, ours, strict=True)) if their != our)
    raise InputError(
        f"class {number} is {ours[number]!r} in {dataset.directory} and {named[number]!r} in the model's id2label: "
        "prepare with --classes in the model's order"
    )

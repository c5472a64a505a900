"""Law: whatever the layout, a round gives the losses and the weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from facility.exchange.messages.report import read_report
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset, write_masked_words
from tests.training.layouts import FOUR, TWO, arguments, rounds_in, run_rounds
from tests.training.test_tasks import save_classifier, write_classes

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen": ("qwen2", {}),
    "gpt2": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2-tied": ("gpt2", {}),
}


def same_as_one_process(tmp_path: Path, world: int, layouts: dict[str, dict[str, Any]], models: list[str]) -> None:
    dataset = write_dataset(tmp_path / "data")
    references, cases = [], []
    for model in models:
        family, changes = MODELS[model]
        directory = save_pico(tmp_path / f"model-{model}", family, **changes)
        references.append((model, arguments(tmp_path / model / "one", directory, dataset, batch_sequences=5)))
        for name, training in layouts.items():
            place = tmp_path / model / name
            cases.append((f"{model} {name}", arguments(place, directory, dataset, batch_sequences=5, **training)))
    for name, code, said in run_rounds(0, 1, references):
        assert code == 0, f"{name}:\n{said}"
    for results in run_distributed(run_rounds, world, cases, timeout=600):
        for name, code, said in results:
            assert code == 0, f"{name}:\n{said}"
    for name, _ in cases:
        model, layout = name.split()
        one, other = tmp_path / model / "one" / "out", tmp_path / model / layout / "out"
        assert largest_difference(one, other) < 5e-6, name
        expected, found = read_report(one), read_report(other)
        for figure in ("loss_received", "loss_returned", "training_loss"):
            assert getattr(found, figure) == pytest.approx(getattr(expected, figure), abs=1e-5), (name, figure)


@pytest.mark.slow
def test_every_layout_of_two_ranks_is_one_process(tmp_path: Path):
    same_as_one_process(tmp_path, 2, TWO, ["llama", "llama-tied", "gpt2-tied"])


@pytest.mark.slow
def test_every_layout_of_four_ranks_is_one_process(tmp_path: Path):
    same_as_one_process(tmp_path, 4, FOUR, ["llama-tied", "qwen"])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_every_layout_of_every_model_is_one_process(tmp_path: Path, world: int, layouts: dict[str, dict[str, Any]]):
    """Longer than a minute: five models under thirteen layouts."""
    same_as_one_process(tmp_path, world, layouts, list(MODELS))


@pytest.mark.slow
def test_adapters_and_bert_in_every_layout_of_four_are_one_process(tmp_path: Path):
    """Longer than a minute: adapters over shards, stages and replicas together, masked words and classes likewise."""
    dataset = write_dataset(tmp_path / "data")
    words, classes = write_masked_words(tmp_path / "words"), write_classes(tmp_path / "classes")
    llama = save_pico(tmp_path / "llama", tie_word_embeddings=True)
    adapters = {"lora": {"rank": 4}, "learning_rate": 1e-2, "epsilon": 1e-5}
    models: dict[str, tuple[Path, Path, dict[str, Any]]] = {
        "adapters": (llama, dataset, adapters),
        "words": (save_pico(tmp_path / "bert", "bert"), words, {}),
        "classes": (save_classifier(tmp_path / "classifier", 4), classes, {}),
    }
    rounds_in([(m, arguments(tmp_path / m / "one", model, data, **t)) for m, (model, data, t) in models.items()])
    for world, layouts in ((2, TWO), (4, FOUR)):
        cases = [
            (f"{m} {name}", arguments(tmp_path / m / name, model, data, **t, **layout))
            for m, (model, data, t) in models.items()
            for name, layout in layouts.items()
        ]
        rounds_in(cases, ranks=world)
        for m, name in (case.split() for case, _ in cases):
            bound = 1e-5 if m == "adapters" else 5e-6  # rounding grows with the learning rate; vectors differ by CPU
            assert largest_difference(tmp_path / m / "one/out", tmp_path / m / name / "out") < bound, (m, name)


def test_replicas_under_a_policy_come_out_as_one_model(tmp_path: Path):
    """Two replicas that average now and then: one update, in which both have a part."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    cases = [
        (
            policy,
            arguments(
                tmp_path / policy,
                model,
                dataset,
                layout={"sharding": "NO_SHARD"},
                steps=4,
                sync={"policy": policy, "every": 2, "optimizer_state": "keep"},
            ),
        )
        for policy in ("local", "partial_reduce", "allreduce")
    ]
    rounds_in(cases, ranks=2)
    for policy, _ in cases:
        report = read_report(tmp_path / policy / "out")
        assert report.loss_returned < report.loss_received, policy
        assert report.position == 16 and report.samples >= 8
    assert read_report(tmp_path / "local/out").details["sync"]["policy"] == "local"

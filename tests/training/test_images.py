"""Laws of training image classifiers: the oracle is a plain PyTorch loop over the images as the processor scales them.

A vision transformer gives the same weights in every layout. A ResNet's ranks normalise by the images that they hold
each, so only one process is compared with the loop, and several with several loops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from facility.exchange.messages.images import ImageSettings
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.scheduling.policies import POLICIES
from facility.exchange.seeds import derive_seed
from facility.training.data.images import augmented
from facility.training.data.order import SampleOrder
from facility.training.schedule import learning_rate
from tests.cases import slow_but
from tests.training.federation import EPSILON, largest_difference, weights
from tests.training.images import CLASSES, PROCESSOR, SIDE, save_image_model, write_images
from tests.training.layouts import FOUR, TWO, arguments, rounds_in

PIPELINE = {"layout": {"stages": 2, "units": [[0, 2], [2, 6]]}}
STEPS, BATCH = 3, 4
CROPPED = {"images": {"crop_padding": 3, "flip": True}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "data")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_image_model(folder / family, family) for family in ("vit", "resnet")}


def scaled(values: np.ndarray) -> torch.Tensor:
    """As the model's own image processor scales them."""
    from transformers import ViTImageProcessorPil

    processor = ViTImageProcessorPil(**{k: v for k, v in PROCESSOR.items() if k != "image_processor_type"})
    return torch.from_numpy(
        np.stack(
            [
                processor([image], do_resize=False, return_tensors="np", input_data_format="channels_first")[
                    "pixel_values"
                ][0]
                for image in values
            ]
        )
    )


def loop(
    model: Path, data: Path, settings: ImageSettings, *, shares: int = 1, steps: int = STEPS
) -> list[dict[str, torch.Tensor]]:
    """Plain PyTorch: the weights of each of `shares` copies, which add up the gradients of their shares of a batch."""
    from transformers import AutoModelForImageClassification

    nets = [AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32).train() for _ in range(shares)]
    training = TrainingSettings(learning_rate=2e-3, steps=steps)
    values = np.load(data / "train.npy").reshape(-1, 3, SIDE, SIDE)
    labels = torch.from_numpy(np.load(data / "train.rows.npy")[:, 0].astype(np.int64))
    order = SampleOrder(sequences=len(values), seed=7, facility="north")
    optimizers = []
    for net in nets:
        groups = [
            {"params": [p for p in net.parameters() if p.dim() >= 2]},
            {"params": [p for p in net.parameters() if p.dim() < 2]},
        ]
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0))
    for step in range(steps):
        indices = order.take(step * BATCH, BATCH)
        seeds = [derive_seed(7, "draw", step * BATCH + i) for i in range(BATCH)]
        images = [
            augmented(torch.from_numpy(values[i].copy()), settings, s).numpy()
            for i, s in zip(indices, seeds, strict=True)
        ]
        pixels, targets = scaled(np.stack(images)), labels[indices]
        for net, mine in zip(nets, torch.arange(BATCH).chunk(shares), strict=True):
            (F.cross_entropy(net(pixel_values=pixels[mine]).logits, targets[mine], reduction="sum") / BATCH).backward()
        for group in zip(*(net.parameters() for net in nets), strict=True):
            total = sum(p.grad for p in group)
            for p in group:
                p.grad = total.clone()
        for net, optimizer in zip(nets, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for one in optimizer.param_groups:
                one["lr"] = learning_rate(step, 3 * steps, training)
            optimizer.step()
            optimizer.zero_grad()
    folder = model.parent
    found = []
    for number, net in enumerate(nets):
        net.save_pretrained(folder / f"loop-{number}")
        found.append(weights(folder / f"loop-{number}"))
    return found


def differs(update: Path, expected: dict[str, torch.Tensor]) -> float:
    found = weights(update)
    assert found.keys() == expected.keys()
    return max((found[n].float() - expected[n].float()).abs().max().item() for n in found if not n.endswith("tracked"))


@pytest.mark.parametrize("family", ["vit", "resnet"])
@pytest.mark.parametrize("more", [{}, CROPPED], ids=["plain", "augmented"])
def test_weights_and_running_statistics_are_those_of_a_plain_loop(tmp_path: Path, data, models, family, more):
    rounds_in([("one", arguments(tmp_path, models[family], data, **more))])
    (expected,) = loop(models[family], data, ImageSettings(**more.get("images", {})))
    assert differs(tmp_path / "out", expected) < 1e-5
    assert largest_difference(models[family], tmp_path / "out") > 1e-3
    tracked = {n: v for n, v in weights(tmp_path / "out").items() if n.endswith("tracked")}
    assert all(int(value) == 0 for value in tracked.values()), "the counter stays as received"
    if family == "resnet":
        assert weights(models[family])["resnet.embedder.embedder.normalization.running_mean"].abs().max() == 0
        assert weights(tmp_path / "out")["resnet.embedder.embedder.normalization.running_mean"].abs().max() > 1e-3


def plain_figures(model: Path, data: Path) -> tuple[float, float]:
    """Loss and accuracy on the validation images as transformers gives them."""
    from transformers import AutoModelForImageClassification

    net = AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32).eval()
    pixels = scaled(np.load(data / "validation.npy").reshape(-1, 3, SIDE, SIDE))
    labels = torch.from_numpy(np.load(data / "validation.rows.npy")[:, 0].astype(np.int64))
    with torch.no_grad():
        logits = net(pixel_values=pixels).logits
    return F.cross_entropy(logits, labels).item(), (logits.argmax(-1) == labels).float().mean().item()


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_loss_and_accuracy_of_the_report_are_those_of_the_model_in_transformers(tmp_path: Path, data, models, family):
    said = rounds_in([("one", arguments(tmp_path, models[family], data, export_dtype="bfloat16", **CROPPED))])
    report = read_report(tmp_path / "out")
    for model, loss, accuracy in (
        (models[family], report.loss_received, report.details["accuracy_received"]),
        (tmp_path / "out", report.loss_returned, report.details["accuracy_returned"]),
    ):
        expected = plain_figures(model, data)
        assert (loss, accuracy) == pytest.approx(expected, abs=1e-5)
    assert f"accuracy {report.details['accuracy_received']:.4f}" in said["one"][0]
    assert report.tokens == report.samples == STEPS * BATCH
    assert (tmp_path / "out/preprocessor_config.json").read_text() == json.dumps(PROCESSOR)


def vit_alike(tmp_path: Path, data: Path, model: Path, layouts: dict[str, dict[str, Any]], ranks: int) -> None:
    more = CROPPED | {"batch_sequences": 8}
    rounds_in([("one", arguments(tmp_path / "one", model, data, **more))])
    rounds_in(
        [(n, arguments(tmp_path / n, model, data, **more, **layout)) for n, layout in layouts.items()], ranks=ranks
    )
    one = read_report(tmp_path / "one/out")
    for name in layouts:
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < 1e-5, name
        assert read_report(tmp_path / name / "out").details["accuracy_returned"] == one.details["accuracy_returned"], (
            name
        )


@pytest.mark.slow
def test_a_vision_transformer_trains_alike_in_a_pipeline_and_sharded(tmp_path: Path, data, models):
    vit_alike(tmp_path, data, models["vit"], {"pipeline": PIPELINE, "fsdp": {}}, 2)


@pytest.mark.slow
def test_a_vision_transformer_trains_alike_in_every_layout_of_two_ranks(tmp_path: Path, data, models):
    vit_alike(tmp_path, data, models["vit"], TWO, 2)


@pytest.mark.slow
def test_a_vision_transformer_trains_alike_in_every_layout_of_four_ranks(tmp_path: Path, data, models):
    vit_alike(tmp_path, data, models["vit"], FOUR, 4)


@pytest.mark.slow
def test_a_vision_transformer_trains_under_every_synchronisation_policy(tmp_path: Path, data, models):
    """What the replicas agree on is one model, whose figures are those that transformers finds of it."""
    policies = sorted(POLICIES.built_in)
    more = {"layout": {"replicas": 2}, "batch_sequences": 8, "steps": 6}
    cases = [(p, arguments(tmp_path / p, models["vit"], data, **more, sync={"policy": p})) for p in policies]
    rounds_in(cases, ranks=2)
    for policy in policies:
        report = read_report(tmp_path / policy / "out")
        found = (report.loss_returned, report.details["accuracy_returned"])
        assert found == pytest.approx(plain_figures(tmp_path / policy / "out", data), abs=1e-5), policy
        assert report.loss_returned < report.loss_received, policy


@pytest.mark.parametrize("sharding", slow_but(["FULL_SHARD"], ["FULL_SHARD", "NO_SHARD"]))
def test_two_ranks_of_a_resnet_normalise_each_by_its_images_and_average_their_statistics(
    tmp_path: Path, data, models, sharding
):
    rounds_in([("two", arguments(tmp_path, models["resnet"], data, layout={"sharding": sharding}))], ranks=2)
    one, other = loop(models["resnet"], data, ImageSettings(), shares=2)
    mean = {name: (one[name].double() + other[name].double()) / 2 for name in one}
    assert differs(tmp_path / "out", mean) < 1e-5
    name = "resnet.embedder.embedder.normalization.running_mean"
    assert (one[name] - other[name]).abs().max() > 1e-4, "the ranks saw the same"


def test_an_image_that_no_step_draws_changes_no_running_statistics(tmp_path: Path, models):
    """A rank whose share is empty in a micro-batch passes one image that counts for nothing: the dataset's first."""
    batch, steps = 3, 2
    drawn = SampleOrder(sequences=40, seed=7, facility="north").take(0, batch * steps)
    assert 0 not in drawn
    cases = []
    for name in ("dark", "bright"):
        data = write_images(tmp_path / f"data-{name}")
        values = np.load(data / "train.npy")
        values[0] = 0 if name == "dark" else 255
        np.save(data / "train.npy", values)
        uneven = {"steps": steps, "batch_sequences": batch, "micro_batch_sequences": 1}
        sharding = {"layout": {"sharding": "NO_SHARD"}}
        cases.append((name, arguments(tmp_path / name, models["resnet"], data, **uneven, **sharding)))
    rounds_in(cases, ranks=2)
    assert largest_difference(tmp_path / "dark/out", tmp_path / "bright/out") == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "diloco", "wave", "adpsgd", "central_ps"])
def test_replicas_of_a_resnet_under_other_policies_train_and_average_their_statistics(
    tmp_path: Path, data, models, policy
):
    sync = {"layout": {"replicas": 2}, "sync": {"policy": policy}}
    rounds_in([("two", arguments(tmp_path, models["resnet"], data, **sync))], ranks=2)
    found, before = weights(tmp_path / "out"), weights(models["resnet"])
    moved = [n for n in found if "running" in n and not found[n].equal(before[n])]
    assert len(moved) == sum("running" in n for n in found)
    assert all((found[n] > 0).all() for n in found if n.endswith("running_var"))
    assert read_report(tmp_path / "out").loss_returned == pytest.approx(
        plain_figures(tmp_path / "out", data)[0], abs=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resnet_paused_in_a_round_ends_as_if_it_had_not_been(tmp_path: Path, data, models, ranks):
    rounds_in([("whole", arguments(tmp_path / "whole", models["resnet"], data))], ranks=ranks)
    again = arguments(tmp_path / "again", models["resnet"], data, limits={"stop_after": 2})
    rounds_in([("stopped", again)], ranks=ranks, expect=85)
    rounds_in([("resumed", arguments(tmp_path / "again", models["resnet"], data))], ranks=ranks)
    assert largest_difference(tmp_path / "whole/out", tmp_path / "again/out") < 1e-6
    reports = [read_report(tmp_path / name / "out") for name in ("whole", "again")]
    assert reports[0].details["accuracy_received"] == reports[1].details["accuracy_received"]


def test_what_a_model_cannot_do_is_refused_in_one_sentence(tmp_path: Path, data, models):
    other_size = save_image_model(tmp_path / "size", "vit", image_size=32)
    other_names = save_image_model(tmp_path / "names", "vit", id2label={0: "right", 1: "middle", 2: "left"})
    other_head = save_image_model(tmp_path / "head", "vit", num_labels=4, id2label=dict(enumerate("abcd")))
    other_scale = save_image_model(tmp_path / "scale", "vit")
    (other_scale / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"image_mean": [0.1, 0.1, 0.1]}))
    cases: dict[str, tuple[Path, dict[str, Any], str]] = {
        "size": (other_size, {}, "has images of 3 x 16 x 16, the model takes 3 x 32 x 32"),
        "names": (other_names, {}, "class 0 is 'left'"),
        "head": (
            other_head,
            {},
            "has 3 classes (left, middle, right), the model's head has 4: make the initial model with these classes",
        ),
        "scale": (other_scale, {}, "was made by another image processor"),
        "adapters": (models["resnet"], {"lora": {"rank": 2, "targets": ["convolution"]}}, "train the whole model"),
        "recompute": (models["resnet"], {"layout": {"activation_checkpointing": "full"}}, "count every batch twice"),
    }
    said = rounds_in(
        [(n, arguments(tmp_path / n / "r", m, data, **more)) for n, (m, more, _) in cases.items()], expect=2
    )
    for name, (_, _, sentence) in cases.items():
        assert sentence in said[name][0] and "Traceback" not in said[name][0], name
    staged = {"layout": {"stages": 2}}
    said = rounds_in([("staged", arguments(tmp_path / "staged", models["resnet"], data, **staged))], ranks=2, expect=2)
    assert all("it normalises over the batch" in text for text in said["staged"])


def test_adapters_of_a_vision_transformer_travel_with_its_head(tmp_path: Path, data, models):
    lora = {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}
    rounds_in([("one", arguments(tmp_path, models["vit"], data, **lora))])
    names = weights(tmp_path / "out")
    assert any("classifier" in name for name in names) and any(".lora_A." in name for name in names)


def test_a_variance_that_does_not_fit_half_precision_is_refused_by_name(tmp_path: Path, data):
    from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors

    model, large = save_image_model(tmp_path / "model", "resnet"), tmp_path / "large"
    name = "resnet.embedder.embedder.normalization.running_var"
    checkpoint = open_checkpoint(model)
    tensors = {n: checkpoint.read(n) for n in checkpoint.tensors}
    tensors[name] = tensors[name] + 1e6
    large.mkdir()
    for file in model.iterdir():
        if file.suffix == ".json":
            (large / file.name).write_bytes(file.read_bytes())
    save_tensors(large, iter(tensors.items()))
    said = rounds_in([("half", arguments(tmp_path / "half", large, data, export_dtype="float16"))], expect=2)
    assert name in said["half"][0] and "bfloat16" in said["half"][0]
    tensors[name] = -tensors[name]
    save_tensors(large, iter(tensors.items()))
    said = rounds_in([("negative", arguments(tmp_path / "negative", large, data))], expect=2)
    assert "a variance below zero" in said["negative"][0]


def test_augmentation_depends_on_its_seed_alone_and_keeps_the_size():
    image = torch.arange(3 * SIDE * SIDE).reshape(3, SIDE, SIDE) % 251
    image = (image + 1).to(torch.uint8)
    settings = ImageSettings(crop_padding=2, flip=True)
    found = [augmented(image, settings, seed) for seed in range(200)]
    assert all(one.shape == image.shape and one.dtype == torch.uint8 for one in found)
    assert all(one.equal(augmented(image, settings, seed)) for seed, one in enumerate(found))
    assert augmented(image, ImageSettings(), 3) is image
    assert len({one.numpy().tobytes() for one in found}) == 2 * 5 * 5, "every place, mirrored and not"
    assert sorted(set(augmented(image, ImageSettings(flip=True), s).equal(image.flip(-1)) for s in range(9))) == [
        False,
        True,
    ]
    assert len(CLASSES) == 3

"""Laws of the loss in chunks: the loss, the gradients and the rounds of the plain one, in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from facility.exchange.memory.chunks import CHUNK_BYTES, CHUNK_ROWS, rows_of
from facility.exchange.messages.report import read_report
from facility.training.data.tasks import IGNORED, cross_entropy_sum
from facility.training.head import ChunkedHead, fused_softmax, softmax, walk
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset, write_masked_words
from tests.training.layouts import arguments, rounds_in
from tests.training.test_layouts import FOUR, TWO
from tests.training.test_tasks import save_classifier, write_classes


class Small(nn.Module):
    """An output layer alone, as a model that has one."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(8, 50, bias=bias)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


@pytest.mark.parametrize("rows", [1, 5, 100])
@pytest.mark.parametrize("bias, later", [(True, False), (False, True), (True, True)])
def test_a_chunked_loss_has_the_value_and_the_gradients_of_the_plain_one(rows: int, bias: bool, later: bool):
    hidden = torch.randn(3, 7, 8, requires_grad=True, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(2))
    targets[1, 2:] = IGNORED
    plain, chunked = Small(bias), Small(bias)
    loss = cross_entropy_sum(plain.head(hidden), targets)
    expected = torch.autograd.grad(loss * 0.25, [hidden, *plain.parameters()])
    install = ChunkedHead(chunked, rows, later=later)
    install.targets = targets
    found_loss = chunked.head(hidden)
    found = torch.autograd.grad(found_loss.sum() * 0.25, [hidden, *chunked.parameters()])
    torch.testing.assert_close(found_loss[0], loss, rtol=1e-6, atol=1e-5)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_softmax_for_a_compiler_is_the_other_one(device: str, dtype: torch.dtype, bound: float):
    """Beside the gradients in float64; on a GPU compiled, and added up by the product itself."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(rows, 64, generator=draw).to(device, dtype) for rows in (70, 256))
    targets = torch.randint(0, 256, (70,), generator=draw).to(device)
    targets[::7] = IGNORED
    exact = [one.double().requires_grad_() for one in (hidden, weight)]
    loss = nn.functional.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=IGNORED, reduction="sum")
    expected = torch.autograd.grad(loss, exact)
    fused = torch.compile(fused_softmax, dynamic=False) if device == "cuda" else fused_softmax
    for kind in (softmax, fused):
        found, gradients = walk(hidden, weight, None, targets, 32, (True, True, False), kind)
        assert abs(found - loss) < bound * loss
        for one, other in zip(gradients, expected, strict=False):
            assert one is not None and (one.double() - other).norm() < bound * other.norm()


def test_half_precision_errs_like_the_plain_loss():
    """Chunks under autocast: the gradient is as near to float32's as that of the plain loss."""
    hidden = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(2))
    gradients = []
    for kind in ("float32", "plain", "chunked"):
        model = Small(False)
        install = ChunkedHead(model, 10) if kind == "chunked" else None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind != "float32"):
            if install is not None:
                install.targets = targets
                loss = model.head(hidden).sum()
            else:
                loss = cross_entropy_sum(model.head(hidden), targets)
        gradients.append(torch.autograd.grad(loss, [model.head.weight])[0])
    exact, plain, chunked = gradients
    assert chunked.dtype == torch.float32
    assert (chunked - exact).norm() < 1.2 * (plain - exact).norm()


def test_a_frozen_output_layer_costs_no_gradient():
    model = Small(False)
    model.head.weight.requires_grad_(False)
    hidden = torch.randn(4, 8, requires_grad=True)
    install = ChunkedHead(model, 2)
    install.targets = torch.tensor([1, 2, 3, 4])
    model.head(hidden).sum().backward()
    assert hidden.grad is not None and model.head.weight.grad is None


def test_chunks_are_bounded_by_size_and_by_number():
    for device, limit in CHUNK_BYTES.items():
        rows = rows_of(8192, 4000, device)
        assert rows == 2048 or rows * 4000 * 4 <= limit < (rows + 1) * 4000 * 4
        assert rows_of(8192, 4_000_000, device) == CHUNK_ROWS[device]
    assert rows_of(80, 128) == 20 and rows_of(1, 1000) == 1


@pytest.mark.slow
def test_every_layout_gives_the_plain_round(tmp_path: Path):
    """FSDP2, replicas, pipelines of every schedule; tied or not; adapters; masked words under a bias."""
    dataset, words = write_dataset(tmp_path / "data"), write_masked_words(tmp_path / "words")
    tied = save_pico(tmp_path / "tied", "llama", tie_word_embeddings=True)
    pairs = {
        "tied": (tied, dataset, {}),
        "gpt2": (save_pico(tmp_path / "gpt2", "gpt2"), dataset, {}),
        "adapters": (tied, dataset, {"lora": {"rank": 4}}),
        "words": (save_pico(tmp_path / "masked", "bert"), words, {}),
    }
    plain, alone, two = [], [], []
    for name, (model, data, training) in pairs.items():
        plain.append((name, arguments(tmp_path / name / "plain", model, data, **training)))
        alone.append((name, arguments(tmp_path / name / "chunked", model, data, chunked_loss="always", **training)))
        layouts = TWO if name == "tied" else {k: TWO[k] for k in ("fsdp", "1f1b")}
        for layout, more in layouts.items():
            place = tmp_path / name / layout
            two.append((f"{name} {layout}", arguments(place, model, data, chunked_loss="always", **training, **more)))
    rounds_in(plain)
    for said in rounds_in(alone).values():
        assert "loss in chunks of" in said[0]
    rounds_in(two, ranks=2)
    for name, place in [(n, "chunked") for n in pairs] + [tuple(n.split()) for n, _ in two]:
        one, other = tmp_path / name / "plain/out", tmp_path / name / place / "out"
        assert largest_difference(one, other) < 5e-6, (name, place)
        assert read_report(other).training_loss == pytest.approx(read_report(one).training_loss, abs=1e-5)


@pytest.mark.slow
def test_every_layout_of_four_ranks_gives_the_plain_round(tmp_path: Path):
    """Half a minute for layouts that two ranks cover in kind."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "tied", tie_word_embeddings=True)
    rounds_in([("plain", arguments(tmp_path / "plain", model, dataset))])
    rounds_in(
        [(n, arguments(tmp_path / n, model, dataset, chunked_loss="always", **t)) for n, t in FOUR.items()], ranks=4
    )
    for name in FOUR:
        assert largest_difference(tmp_path / "plain/out", tmp_path / name / "out") < 5e-6, name


def test_a_model_that_caps_its_logits_is_left_alone_or_refused(tmp_path: Path):
    from transformers import AutoModelForCausalLM, Gemma2Config

    dataset, classes = write_dataset(tmp_path / "data"), write_classes(tmp_path / "classes")
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model, classifier = tmp_path / "model", save_classifier(tmp_path / "classifier", 2)
    said = rounds_in(
        [
            ("capped", arguments(tmp_path / "a", model, dataset, chunked_loss="always")),
            ("classes", arguments(tmp_path / "b", classifier, classes, chunked_loss="always")),
        ],
        expect=2,
    )
    assert "changes its logits after the output layer" in said["capped"][0]
    assert "no linear output layer" in said["classes"][0]
    plain = save_pico(tmp_path / "plain")
    said = rounds_in(
        [
            ("auto", arguments(tmp_path / "c", model, dataset)),
            ("plain", arguments(tmp_path / "d", plain, dataset, chunked_loss="always")),
        ]
    )
    assert "all logits at once: the logits of a forward pass (4 x 16 positions x 128)" in said["auto"][0]
    assert "loss in chunks of" in said["plain"][0]

"""Two unlike facilities of handwritten digits as folders of images, and two small models to begin with.

    python -m examples.digits --out digits

The 1,797 digits of 8 x 8 pixels that scikit-learn ships (Alpaydin and Kaynak 1998, UCI, "Optical Recognition of
Handwritten Digits"). `north` writes black on white and has mostly digits 0 to 4, `south` white on black and mostly 5 to
9; `held-out` has both. Models with random weights: a vision transformer and a ResNet, with their image processor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

COMMON = 0.85
"""Share of the digits that a facility has many of."""
HELD_OUT, VALIDATION = 0.2, 0.2
"""Share of all digits that no facility has, and of a facility's that it does not train on."""
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 16, "width": 16},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def draw(out: Path) -> None:
    """Write every digit as OUT/PLACE/CLASS/NUMBER.png."""
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    random = np.random.default_rng(0)
    for number, (values, label) in enumerate(zip(data.images, data.target, strict=True)):
        place = "held-out"
        if random.random() >= HELD_OUT:
            own = "north" if label < 5 else "south"
            other = "south" if own == "north" else "north"
            facility = own if random.random() < COMMON else other
            place = f"{facility}/{'validation' if random.random() < VALIDATION else 'train'}"
        inverted = place.startswith("north") or (place == "held-out" and number % 2 == 0)
        pixels = np.round(values / 16 * 255)
        image = Image.fromarray((255 - pixels if inverted else pixels).astype(np.uint8))
        folder = out / place / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:04d}.png")


def models(out: Path) -> None:
    """Write OUT/vit and OUT/resnet with random weights."""
    import torch
    from transformers import AutoModelForImageClassification, ResNetConfig, ViTConfig

    names = {"num_labels": 10, "id2label": {n: str(n) for n in range(10)}, "label2id": {str(n): n for n in range(10)}}
    configs = {
        "vit": ViTConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **names,
        ),
        "resnet": ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", **names),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForImageClassification.from_config(config).save_pretrained(out / name)
        (out / name / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    out = parser.parse_args().out
    draw(out)
    models(out)
    counts = {place: len(list((out / place).rglob("*.png"))) for place in ("north", "south", "held-out")}
    print(", ".join(f"{place}: {count} images" for place, count in counts.items()))


if __name__ == "__main__":
    main()

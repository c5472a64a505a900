"""Inner optimizers: torch's own as oracles, and what they keep, pauses and layouts leave unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from facility.exchange.checkpoints.moments import FIRST, FULL, Moment, write_moments
from facility.exchange.checkpoints.second_moments import Factors, write_factors
from facility.exchange.errors import ConfigurationError
from facility.exchange.memory.optimizer_state import state_bytes, with_second_moments
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.protocol import optimizer_of
from facility.training.shards import LocalShard, shard_of
from facility.training.state import moments, second_moments
from facility.training.state.second_moments import SECOND
from facility.training.state.state import kept_of, moments_of
from facility.training.state.step_counts import count_alike, decay_alike
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in

SHAPES = {"model.embed_tokens.weight": (12, 6), "layer.wide.weight": (4, 9), "layer.tall.weight": (9, 4), "norm": (7,)}


def shards(seed: int = 0) -> list[LocalShard]:
    draw = torch.Generator().manual_seed(seed)
    return [shard_of(name, torch.nn.Parameter(torch.randn(shape, generator=draw))) for name, shape in SHAPES.items()]


def steps(optimizer: Any, tensors: list[torch.Tensor], first: int = 0, count: int = 4) -> None:
    """Steps `first`, `first` + 1, ... with gradients that the step's number decides."""
    for number in range(first, first + count):
        draw = torch.Generator().manual_seed(number)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=draw)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        optimizer.step()


def oracle(name: str, tensors: list[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """torch's own optimizers over copies of the parameters, in the order of `SHAPES`."""
    embedding, wide, tall, norm = tensors
    if name == "adafactor":
        return [
            torch.optim.Adafactor([embedding, wide, tall], weight_decay=0.1),
            torch.optim.Adafactor([norm], weight_decay=0.0),
        ]
    adamw = {"betas": (0.9, 0.95), "eps": 1e-8}
    decaying = [embedding] if name == "muon" else [embedding, wide, tall]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(decaying, weight_decay=0.1, fused=True, **adamw),  # type: ignore[arg-type]
        torch.optim.AdamW([norm], weight_decay=0.0, fused=True, **adamw),  # type: ignore[arg-type]
    ]
    if name == "muon":
        found.append(torch.optim.Muon([wide, tall], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    return found


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_steps_are_those_of_torch(name: str):
    ours = shards()
    copies = [part.tensor.detach().clone().requires_grad_() for part in ours]
    parameters: dict[str, Any] = {"precision": "bfloat16"} if name == "muon" else {}
    settings = TrainingSettings(optimizer=name, weight_decay=0.1, optimizer_parameters=parameters)
    steps(optimizer_of(ours, settings), [part.tensor for part in ours])
    others = oracle(name, copies)

    class Together:
        param_groups = [group for one in others for group in one.param_groups]

        def step(self) -> None:
            for one in others:
                one.step()

    steps(Together(), copies)
    for part, copy in zip(ours, copies, strict=True):
        if name == "adafactor":
            assert torch.allclose(part.tensor, copy, rtol=1e-5, atol=1e-6), part.name
        else:
            assert torch.equal(part.tensor, copy), part.name


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_what_is_kept_has_the_names_and_shapes_that_are_stored(name: str):
    parts = shards()
    optimizer = optimizer_of(parts, TrainingSettings(optimizer=name))
    held = {part.name: tuple(part.tensor.shape) for part in moments_of(optimizer, parts)}
    kept = kept_of(optimizer, ())
    assert held == {f"{kind}.{n}": whole for n, shape in SHAPES.items() for kind, whole in kept(n, shape)}
    values = sum(torch.Size(shape).numel() for shape in held.values())
    assert values * 4 == state_bytes(TrainingSettings(optimizer=name), SHAPES.items())


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
@pytest.mark.parametrize("shape", [(5,), (5, 7), (3, 5, 7)], ids=str)
def test_what_is_kept_of_any_shape_is_predicted(name: str, shape: tuple[int, ...]):
    given: dict[str, Any] = {"adamw": "one.*"} if name == "muon" else {}
    settings = TrainingSettings(optimizer=name, optimizer_parameters=given)
    kept = kept_of(optimizer_of(shards(), settings), ())
    for weight in ("one.weight", "other.weight"):
        values = sum(torch.Size(whole).numel() for _, whole in kept(weight, shape))
        assert state_bytes(settings, [(weight, shape)]) == 4 * values, weight
        second = [whole for key, whole in kept(weight, shape) if key == SECOND]
        assert with_second_moments(settings, [(weight, shape)]) == second, weight


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_steps_after_a_pause_are_the_same(name: str):
    whole, paused, settings = shards(), shards(), TrainingSettings(optimizer=name)
    steps(optimizer_of(whole, settings), [part.tensor for part in whole])
    before = optimizer_of(paused, settings)
    steps(before, [part.tensor for part in paused], 0, 2)
    after = optimizer_of(paused, settings)
    for new, old in zip(moments_of(after, paused), moments_of(before, paused), strict=True):
        new.tensor.copy_(old.tensor)
    for part in paused:
        if "step" in after.state[part.tensor]:
            after.state[part.tensor]["step"].fill_(2.0)
    steps(after, [part.tensor for part in paused], 2, 2)
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(whole, paused, strict=True))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "muom"}, "muon"),
        ({"optimizer": "muon", "optimizer_parameters": {"momentum": 2.0}}, "momentum"),
        ({"optimizer_parameters": {"momentum": 0.5}}, "adamw"),
        ({"optimizer": "adafactor", "optimizer_state": "shared"}, "second moment"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], told: str):
    with pytest.raises(ConfigurationError, match=told):
        TrainingSettings(**settings)


@pytest.mark.slow
def test_every_layout_ends_as_one_process_does(tmp_path: Path):
    """Two rounds under FSDP2 and a pipeline, state resharded in between."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")

    def two_rounds(name: str, ranks: int, layouts: dict[str, dict[str, Any]]) -> None:
        first, second = [], []
        for layout, settings in layouts.items():
            at = tmp_path / name / layout
            chosen = settings | {"optimizer": name}
            first.append((f"{name} {layout} 0", arguments(at / "0", model, dataset, **chosen)))
            following = arguments(at / "1", model, dataset, 1, **chosen)
            following[following.index("--state") + 1] = str(at / "0" / "state")
            second.append((f"{name} {layout} 1", following))
        rounds_in([*first, *second], ranks=ranks)

    for name in ("muon", "adafactor"):
        two_rounds(name, 1, {"one": {}})
        two_rounds(name, 2, {layout: TWO[layout] for layout in ("fsdp", "1f1b")})
        for layout in ("fsdp", "1f1b"):
            for number in ("0", "1"):
                one, other = (tmp_path / name / which / number / "out" for which in ("one", layout))
                assert largest_difference(one, other) < 1e-5, (name, layout, number)
        again = tmp_path / name / "changed"
        moved = arguments(again, model, dataset, 1, optimizer="adamw")
        moved[moved.index("--state") + 1] = str(tmp_path / name / "one" / "0" / "state")
        rounds_in([(f"{name} then adamw", moved)])


def test_a_round_with_muon_goes_on_where_it_stopped_under_another_layout(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    muon = {"optimizer": "muon", "steps": 4}
    rounds_in([("quiet", arguments(tmp_path / "quiet", model, dataset, **muon))])
    stopped = arguments(tmp_path / "stopped", model, dataset, **muon, limits={"stop_after": 2})
    rounds_in([("stopped", stopped)], expect=Outcome.CHECKPOINTED)
    rounds_in([("stopped", arguments(tmp_path / "stopped", model, dataset, **muon))], ranks=2)
    assert largest_difference(tmp_path / "quiet" / "out", tmp_path / "stopped" / "out") < 1e-5


@pytest.mark.parametrize("form", ["factors", "full"])
def test_a_parameter_that_no_moments_came_for_begins_like_a_new_one(form: Any, tmp_path: Path):
    """A facility that has none of its own takes over the others' count of steps with their moments: where there are
    none, zero moments of a thousand steps made steps several times too long. What is kept has one count for all."""
    parts, plain = shards(), shards()
    save_file({part.name: part.tensor.detach() for part in parts}, tmp_path / "model.safetensors")
    settings = TrainingSettings(beta2=0.999, optimizer_state="shared", optimizer_state_form=form, first_moments="mean")
    optimizer = optimizer_of(parts, settings)
    factors, came = {"norm": Factors(np.ones(7, np.float32), None)}, {"norm"}
    first = ones([Moment(name=name, form=FIRST, shape=shape) for name, shape in SHAPES.items()])
    if form == "full":
        wide = Moment(name="layer.wide.weight", form=FULL, shape=SHAPES["layer.wide.weight"])
        write_moments(tmp_path, {wide: lambda _, n: np.ones((n, 9), np.float32)} | first, steps=1000)
        came |= {wide.name}
    else:
        write_moments(tmp_path, first, steps=1000)
    write_factors(tmp_path, factors, steps=1000)
    seen, _ = second_moments.take_over(tmp_path, optimizer, parts, beta2=0.999, steps=0)
    assert moments.take_over(tmp_path, optimizer, parts, settings, steps=seen) == 1000
    steps(optimizer, [part.tensor for part in parts], count=2)
    steps(new := optimizer_of(plain, settings), [part.tensor for part in plain], count=2)
    for one, other in zip(parts, plain, strict=True):
        assert torch.equal(one.tensor, other.tensor) == (one.name not in came), one.name
    before = {id(part): {kind: value.clone() for kind, value in optimizer.state[part.tensor].items()} for part in parts}
    count_alike(optimizer, parts, 1002)
    for part in parts:
        state, had = optimizer.state[part.tensor], before[id(part)]
        assert float(state["step"]) == 1002
        for kind, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999)):
            corrected = had[kind] / (1 - beta ** float(had["step"]))
            torch.testing.assert_close(state[kind] / (1 - beta**1002), corrected)
    count_alike(new, plain, 2)
    assert all(float(new.state[part.tensor]["step"]) == 2 for part in plain)


@pytest.mark.parametrize(("before", "now"), [((0.9, 0.999), (0.9, 0.95)), ((0.5, 0.9), (0.95, 0.999))])
def test_decays_that_are_changed_between_rounds_leave_the_corrected_moments(before: Any, now: Any):
    """beta2 lowered after ten steps made the next ones seven times too long, and raised, six times too short."""
    parts, same = shards(), shards()
    settings = TrainingSettings(beta1=before[0], beta2=before[1])
    steps(first := optimizer_of(parts, settings), [part.tensor for part in parts], count=10)
    changed = optimizer_of(same, TrainingSettings(beta1=now[0], beta2=now[1]))
    for part, other in zip(parts, same, strict=True):
        had = first.state[part.tensor]
        changed.shards(other)
        changed.state[other.tensor].update({kind: value.clone() for kind, value in had.items()})
    decay_alike(changed, same, before)
    for part, other in zip(parts, same, strict=True):
        for kind, old, new in zip(("exp_avg", "exp_avg_sq"), before, now, strict=True):
            had, have = (one.state[tensor][kind] for one, tensor in ((first, part.tensor), (changed, other.tensor)))
            torch.testing.assert_close(have / (1 - new**10), had / (1 - old**10))
    kept = {part.name: changed.state[part.tensor]["exp_avg_sq"].clone() for part in same}
    decay_alike(changed, same, None)
    decay_alike(changed, same, now)
    assert all(torch.equal(kept[part.name], changed.state[part.tensor]["exp_avg_sq"]) for part in same)


def ones(found: list[Moment]) -> dict[Moment, Any]:
    return {m: lambda _, n, w=m.width: np.ones((n, w), np.float32) for m in found}


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim:Adam"])
def test_an_optimizer_that_does_not_say_what_it_keeps_is_refused(name: str) -> None:
    """It passed `crossfed check` and ended every facility's job in a TypeError."""
    with pytest.raises(ConfigurationError, match="has no method kept and no shards: expected adafactor, .* or a class"):
        optimizer_of(shards(), TrainingSettings(optimizer=name))

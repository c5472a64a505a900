"""Laws of a dataset's account: all federations on it together stay within what the site allows."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.manifest import Manifest, with_extra
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.privacy import DATASET_LIMIT, RELEASED, DifferentialSettings
from facility.exchange.messages.report import read_failure, read_report
from facility.rounds.dataset_budget import (
    Reserved,
    account_path,
    alone,
    count_released,
    read_account,
    reserve_budget,
    write_account,
)
from facility.rounds.privacy_ledger import ledger_path
from facility.rounds.released import check_remembered, steps_released
from tests.rounds.test_round import Site
from tests.training.federation import write_dataset, write_settings

RELEASE = '{"kind": "training", "round": 0, "unit": "document", "noise_multiplier": 1.0, "sampling_rate": 0.1}\n'


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CROSSFED_STATE", raising=False)
    return write_dataset(tmp_path / "site" / "data")


def reserve(
    dataset: Path, federation: str, epsilon: float, limit: str = "", *, steps: int = 0, **changes: object
) -> None:
    """`epsilon` 0: a federation without differential privacy."""
    asked = DifferentialSettings(**({"epsilon": epsilon, "delta": 1e-6} | changes)) if epsilon else None  # type: ignore[arg-type]
    settings = SimpleNamespace(federation=federation, facility="north", differential=asked)
    ledger = ledger_path(state := dataset.parent / ".crossfed" / federation / "north")
    ledger.parent.mkdir(parents=True, exist_ok=True)
    ledger.write_text(RELEASE * steps + RELEASE.replace("training", "validation"))
    reserve_budget(settings, dataset, {DATASET_LIMIT: limit} if limit else {}, state=state)  # type: ignore[arg-type]


def reserved(dataset: Path) -> dict[str, float]:
    return {name: one.epsilon for name, one in read_account(account_path(dataset)).items()}


def test_budgets_of_all_federations_add_up_and_the_one_too_many_is_refused(dataset: Path):
    reserve(dataset, "heron", 6.0)  # before the site had a limit
    reserve(dataset, "crane", 4.0, limit="10")
    with pytest.raises(InputError, match=r"others have reserved 10 \(crane/north 4, heron/north 6\).* ask for 0.1"):
        reserve(dataset, "stork", 0.1, limit="10")
    assert reserved(dataset) == {"heron/north": 6.0, "crane/north": 4.0}, "what is refused reserves nothing"
    assert account_path(dataset).stat().st_mode & 0o077 == 0 or account_path(dataset).parent.stat().st_mode & 0o077 == 0


def test_deltas_of_all_federations_add_up_too_and_bound_something(dataset: Path):
    """Each alone is below one over the 40 blocks, and all together allow that a block is published whole."""
    for name in ("heron", "crane"):
        reserve(dataset, name, 1.0, limit="10", delta=0.01, unit="block")
    with pytest.raises(InputError, match="deltas of all federations on it add up to 0.03, more than one over its 40"):
        reserve(dataset, "stork", 1.0, limit="10", delta=0.01, unit="block")
    reserve(dataset, "stork", 1.0, limit="10", delta=1e-6, unit="block")


def test_every_round_of_a_federation_reserves_the_same_once_and_a_larger_budget_its_difference(dataset: Path):
    for epsilon in (2.0, 2.0, 5.0, 3.0):
        reserve(dataset, "heron", epsilon, limit="5")
    assert reserved(dataset) == {"heron/north": 5.0}, "what may have been spent is never given back"
    with pytest.raises(InputError, match="out of the dataset's privacy budget"):
        reserve(dataset, "heron", 5.5, limit="5")


def test_a_larger_delta_stays_reserved_when_a_smaller_one_is_asked_for(dataset: Path):
    for delta in (1e-6, 0.02, 1e-6):
        reserve(dataset, "heron", 1.0, limit="10", delta=delta)
    assert read_account(account_path(dataset))["heron/north"].delta == 0.02
    with pytest.raises(InputError, match=r"deltas of all federations on it add up to 0\.03"):
        reserve(dataset, "crane", 1.0, limit="10", delta=0.01)


def test_deltas_are_measured_by_the_units_that_are_protected(tmp_path: Path):
    """Many documents share a block: one over their number is less than one over that of the blocks."""
    dataset = write_dataset(tmp_path / "many" / "data")
    manifest = json.loads((dataset / "dataset.json").read_text())
    manifest["splits"]["train"]["documents"] = 4000
    (dataset / "dataset.json").write_text(json.dumps(manifest))
    reserve(dataset, "heron", 1.0, limit="10", delta=0.001, unit="block")
    other = dataset.with_name("other")
    shutil.copytree(dataset, other)
    account_path(dataset).unlink()
    with pytest.raises(InputError, match="more than one over its 4000 units"):
        reserve(other, "heron", 1.0, limit="10", delta=0.001)


def test_the_account_follows_the_data_not_its_place(dataset: Path):
    reserve(dataset, "heron", 6.0)
    copy = dataset.with_name("copy")
    shutil.copytree(dataset, copy)
    other = write_dataset(dataset.with_name("other"), train=41)
    assert account_path(copy) == account_path(dataset) != account_path(other)
    with pytest.raises(InputError, match="heron/north 6"):
        reserve(copy, "crane", 6.0, limit="10")
    reserve(other, "crane", 6.0, limit="10")


def test_a_limit_is_not_one_for_each_path_to_the_dataset(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without CROSSFED_STATE the account lies beside the path: a link elsewhere began another one."""
    reserve(dataset, "heron", 6.0, limit="10")
    (tmp_path / "home").mkdir()
    (link := tmp_path / "home" / "data").symlink_to(dataset)
    with pytest.raises(InputError, match=f"export CROSSFED_STATE={tmp_path / 'home' / '.crossfed'}"):
        reserve(link, "crane", 6.0, limit="10")
    (beside := dataset.with_name("beside")).symlink_to(dataset)
    (above := tmp_path / "above").symlink_to(dataset.parent)
    monkeypatch.setenv("CROSSFED_STATE", str(dataset.parent / ".crossfed"))
    for path, state in ((link, "set"), (beside, "set"), (beside, ""), (above / "data", "")):
        monkeypatch.setenv("CROSSFED_STATE", str(dataset.parent / ".crossfed") if state else "")
        with pytest.raises(InputError, match="heron/north 6"):
            reserve(path, "crane", 6.0, limit="10")
    monkeypatch.setenv("CROSSFED_STATE", str(tmp_path / "states"))
    reserve(link, "crane", 6.0, limit="10")  # anywhere, as long as it is one for all paths
    monkeypatch.delenv("CROSSFED_STATE")
    reserve(link, "crane", 6.0)  # where the site has no limit, any path will do


def test_data_of_ones_own_trainer_has_one_account_by_its_place(dataset: Path):
    """Without a manifest its units are not known, and no sum of deltas is too large for them."""
    (own := dataset.with_name("own")).mkdir()
    (link := dataset.with_name("link")).symlink_to(own)
    reserve(own, "heron", 6.0, limit="10", delta=0.5)
    with pytest.raises(InputError, match="heron/north 6"):
        reserve(link, "crane", 6.0, limit="10")
    reserve(link, "crane", 4.0, limit="10", delta=0.4)
    assert reserved(own) == {"heron/north": 6.0, "crane/north": 4.0}


def test_two_jobs_that_reserve_at_once_are_told_of_each_other(dataset: Path):
    with ThreadPoolExecutor(1) as other:
        with alone(path := account_path(dataset)):
            late = other.submit(reserve, dataset, "crane", 6.0, limit="10")
            with pytest.raises(TimeoutError):
                late.result(timeout=0.2)
            mine = Reserved(epsilon=6.0, delta=1e-6, unit="document")
            write_account(path, {"heron/north": mine})
        with pytest.raises(InputError, match="others have reserved 6 "):
            late.result(timeout=60)


def test_without_differential_privacy_nothing_is_trained_where_there_is_a_limit(dataset: Path):
    reserve(dataset, "heron", 0.0)
    assert not account_path(dataset).exists()
    with pytest.raises(InputError, match="nothing would bound"):
        reserve(dataset, "heron", 0.0, limit="10")


def test_units_that_differ_add_up_to_no_bound(dataset: Path):
    reserve(dataset, "heron", 1.0, unit="block")
    reserve(dataset, "crane", 1.0)
    with pytest.raises(InputError, match="protected another unit"):
        reserve(dataset, "stork", 1.0, limit="10")


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": {"epsilon": "x"}}'])
def test_a_damaged_account_stops_every_further_release(dataset: Path, text: str):
    reserve(dataset, "heron", 1.0)
    account_path(dataset).write_text(text)
    with pytest.raises(InputError, match="restore the file from a backup"):
        reserve(dataset, "crane", 1.0)


@pytest.mark.parametrize("text", ["many", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(dataset: Path, text: str):
    with pytest.raises(ConfigurationError, match=f"{DATASET_LIMIT} is '{text}'"):
        reserve(dataset, "heron", 1.0, limit=text)


def test_the_account_is_json_that_an_owner_can_read(dataset: Path):
    reserve(dataset, "heron", 2.0)
    told = json.loads(account_path(dataset).read_text())
    assert told == {"heron/north": {"epsilon": 2.0, "delta": 1e-6, "unit": "document", "steps": 0}}


def test_a_ledger_that_was_removed_or_restored_releases_nothing_more(dataset: Path):
    """It holds less than the account saw, at the beginning or the end of a job, or than its reports have told."""
    reserve(dataset, "heron", 2.0, steps=4)
    settings = SimpleNamespace(federation="heron", facility="north", differential=object())
    state = dataset.parent / ".crossfed" / "heron" / "north"
    ledger_path(state).write_text(RELEASE * 8 + RELEASE[:20])
    count_released(settings, dataset, state)  # type: ignore[arg-type]
    assert read_account(account_path(dataset))["heron/north"].steps == 8, "a line that was cut off was not used"
    before = account_path(dataset).read_bytes()
    for steps in (0, 7):
        with pytest.raises(
            InputError, match=f"holds {steps} noised steps, and the dataset's account .* count 8: it was"
        ):
            reserve(dataset, "heron", 2.0, steps=steps)
    assert account_path(dataset).read_bytes() == before
    reserve(dataset, "heron", 2.0, steps=8)

    def received(told: object) -> Manifest:
        return Manifest(kind="model", federation="heron", round=2, extra={RELEASED: told})

    for told in ({"north": 8}, {"north": 0}, {"south": 9}, {"north": "9"}, {"north": True}, {"north": -9}, [9], None):
        check_remembered(received(told), settings, state)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="holds 8 noised steps, and this facility's own reports .* count 9: it was"):
        check_remembered(received({"north": 9}), settings, state)  # type: ignore[arg-type]
    settings.differential = None
    check_remembered(received({"north": 9}), settings, state)  # type: ignore[arg-type]


def test_an_account_of_an_earlier_version_counts_no_steps_yet(dataset: Path):
    reserve(dataset, "heron", 2.0)
    account = json.loads(account_path(dataset).read_text())
    del account["heron/north"]["steps"]
    account_path(dataset).write_text(json.dumps(account))
    reserve(dataset, "heron", 2.0)
    reserve(dataset, "heron", 2.0, steps=3)
    assert json.loads(account_path(dataset).read_text())["heron/north"]["steps"] == 3


@pytest.mark.slow
def test_a_job_whose_ledger_forgot_steps_trains_nothing_and_says_so(dataset: Path):
    """Steps that the account saw at the end of the job before, or that the model says were told of."""
    root = dataset.parent
    settings = write_settings(root / "settings.json", rounds=3)
    raw = json.loads(settings.read_text()) | {"differential": {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}}
    settings.write_text(json.dumps(raw))
    site = Site(root)
    first, update = site.run(site.send(), real=True)
    assert first.returncode == 0, first.stderr
    (account,) = read_account(account_path(dataset)).values()
    ledger = ledger_path(root / ".crossfed" / "pico" / "north")
    assert account.steps == steps_released(ledger.parents[1]) == read_report(update).details["privacy"]["steps"] > 0
    told = site.send(round=1)
    with_extra(told, RELEASED, {"north": account.steps + 1})
    second, update = site.run(told, round=1)
    assert second.returncode == Outcome.SKIPPED
    assert "this facility's own reports to the coordinator count" in read_failure(update).reason  # type: ignore[union-attr]
    ledger.unlink()
    third, update = site.run(site.send(round=1), round=1)
    assert third.returncode == Outcome.SKIPPED and not ledger.exists()
    assert "holds 0 noised steps, and the dataset's account" in read_failure(update).reason  # type: ignore[union-attr]

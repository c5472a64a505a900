"""What a job is called in a queue says whose it is: cancelling one federation's cancels no other's."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from coordinator.config.facility_names import MADE, TAKEN, check_names
from coordinator.engine import live, one_run, place
from coordinator.preflight import last_check
from facility.exchange.errors import ConfigurationError
from facility.exchange.job_names import job_name, waiting_name
from facility.exchange.text import NAME

NAMES = [name for length in range(1, 6) for name in map("".join, product("a-", repeat=length)) if NAME.fullmatch(name)]


def test_no_two_pairs_of_federation_and_facility_have_jobs_of_one_name():
    """Tried with all names of up to five letters, and those that end as CrossFed's own do."""
    names = [*NAMES, *(f"a{suffix}" for suffix in MADE), "ahead", "a-ahead-ahead"]
    found: dict[str, tuple[str, str]] = {}
    for pair in product(names, names):
        assert found.setdefault(job_name(*pair), pair) == pair
    for federation, facility in product(names, names):
        taken = found.get(waiting_name(job_name(federation, facility)))
        assert taken in (None, (federation, f"{facility}-ahead")), "only of a facility that may not stand beside it"


def test_names_without_a_hyphen_are_as_they_look():
    assert job_name("heron", "nest-alpha") == "crossfed-heron-nest-alpha"
    assert job_name("heron-nest", "alpha") == "crossfed-heron--nest-alpha"


def test_what_is_made_for_one_facility_is_the_name_of_no_other():
    for suffix in MADE:
        check_names([f"a{suffix}", "b", f"c{suffix}"])
        try:
            check_names(["b", f"A{suffix}", "a"])
        except ConfigurationError as error:
            assert error.key == "facilities[1].name" and "facility 'A'" in str(error)
        else:
            raise AssertionError(suffix)


def test_no_facility_works_where_a_run_keeps_what_it_removes(tmp_path: Path):
    """`engine` is emptied by every run: the jobs that an interrupted run of a facility so called had left, too."""
    kept = {live.FILE, one_run.WORKDIR_LOCK, last_check.FILE, place.login_place(tmp_path).name}
    with place.run_place(tmp_path) as run:
        kept.add(run.path.name)
    assert kept <= set(TAKEN)
    for name in ("Engine", *TAKEN):
        with pytest.raises(ConfigurationError, match="a run itself keeps") as caught:
            check_names(["a", name], ["a", name])
        assert caught.value.key == "facilities[1].name"
        check_names(["a", name], ["a"])

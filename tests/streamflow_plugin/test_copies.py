"""Of data that went to many facilities, each facility's copy is found there, and a look-up goes through no others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("streamflow")

from streamflow.core.data import DataLocation, DataType
from streamflow.core.deployment import ExecutionLocation
from streamflow.data.manager import DefaultDataManager

from coordinator.config.deployment_names import FACILITY
from coordinator.streamflow_plugin.copies import going_to
from coordinator.streamflow_plugin.facility_steps import CarefulDataManager

ORIGINAL = "/archive/model"


def place(deployment: str, path: str, *, local: bool = False) -> DataLocation:
    location = ExecutionLocation(deployment=deployment, local=local, name="node")
    return DataLocation(location=location, path=path, relpath="model", data_type=DataType.PRIMARY, available=True)


def sent(manager: Any, facilities: int) -> Any:
    """A model at the coordinator and its copies at facilities, in one manager."""
    original = place("coordinator", ORIGINAL, local=True)
    manager.path_mapper.put(ORIGINAL, original, recursive=True)
    for number in range(facilities):
        copy = place(f"{FACILITY}f{number}", f"/site/{number}/model")
        manager.path_mapper.put(copy.path, copy)
        manager.register_relation(original, copy)
    return manager


@pytest.mark.parametrize("facilities", [1, 3, 40])
def test_a_look_up_of_the_original_goes_through_no_copies(facilities: int):
    manager = sent(CarefulDataManager(SimpleNamespace()), facilities)
    assert [one.path for one in manager.get_data_locations(ORIGINAL)] == [ORIGINAL]


def test_every_facility_finds_its_own_copy_as_in_streamflow():
    ours = sent(CarefulDataManager(SimpleNamespace()), 5)
    theirs = sent(DefaultDataManager(SimpleNamespace()), 5)
    for number in range(5):
        name = f"{FACILITY}f{number}"
        for manager in (ours, theirs):
            found = manager.get_data_locations(ORIGINAL, deployment=name, location_name="node")
            assert [one.path for one in found] == [f"/site/{number}/model"]
            source = asyncio.run(manager.get_source_location(ORIGINAL, name))
            assert source.path == f"/site/{number}/model"
        back = ours.get_data_locations(f"/site/{number}/model")
        assert {one.path for one in back} == {f"/site/{number}/model", ORIGINAL}
    assert asyncio.run(ours.get_source_location(ORIGINAL, f"{FACILITY}new")).path == ORIGINAL


def test_a_transfer_to_a_facility_sees_what_that_facility_holds():
    manager = sent(CarefulDataManager(SimpleNamespace()), 3)
    with going_to(f"{FACILITY}f1"):
        found = manager.path_mapper.get(ORIGINAL, data_type=DataType.PRIMARY)
        assert [one.path for one in found] == [ORIGINAL, "/site/1/model"]
        assert manager.path_mapper.get(ORIGINAL, data_type=DataType.SYMBOLIC_LINK) == []
    assert len(manager.path_mapper.get(ORIGINAL)) == 1


def test_a_copy_that_is_entered_twice_is_one():
    manager = sent(sent(CarefulDataManager(SimpleNamespace()), 2), 2)
    assert len(manager.get_data_locations(ORIGINAL, deployment=f"{FACILITY}f0")) == 1


@pytest.mark.parametrize("available", [False, True], ids=["never made", "made in part"])
def test_a_copy_that_failed_is_made_anew_and_nothing_waits_for_it(available: bool):
    """The settings file is the same in every round: a facility whose disk was full once is sent it again."""
    manager = sent(CarefulDataManager(SimpleNamespace()), 2)
    failed = place(f"{FACILITY}f2", "/site/2/job/x/model")
    if not available:
        failed.available.clear()
    manager.path_mapper.put(failed.path, failed, recursive=True)
    original = next(one for one in manager.get_data_locations(ORIGINAL) if one.deployment == "coordinator")
    manager.register_relation(original, failed)
    manager.path_mapper.forget("/site/2/job")

    async def source(deployment: str) -> str:
        return (await asyncio.wait_for(manager.get_source_location(ORIGINAL, deployment), 60)).path

    assert asyncio.run(source(failed.deployment)) == ORIGINAL
    with going_to(failed.deployment):
        assert [one.path for one in manager.path_mapper.get(ORIGINAL, data_type=DataType.PRIMARY)] == [ORIGINAL]
    assert asyncio.run(source(f"{FACILITY}f1")) == "/site/1/model"
    manager.path_mapper.forget("/nothing/there")

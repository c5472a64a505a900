"""Nothing is asked of a facility about files that no step wants listed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from streamflow.cwl import utils
from streamflow.cwl.utils import LoadListing

from coordinator.streamflow_plugin.listings import without_listing

TOKEN = {"class": "Directory", "path": "/scratch/update", "location": "file:///scratch/update", "basename": "update"}


class Asked(Exception):
    """A file system was asked."""


class Unanswering:
    """A connector that runs nothing."""

    async def run(self, *args, **rest):
        raise Asked(args)


def update(function, token, load_listing: LoadListing):
    connector, location = Unanswering(), SimpleNamespace(local=False, wraps=None, deployment="facility_a")
    deployments = SimpleNamespace(get_connector=lambda name: connector)
    context = MagicMock(deployment_manager=deployments)
    return asyncio.run(function(context, connector, "v1.2", location, token, None, load_listing))


@pytest.mark.parametrize("listing", [{}, {"listing": [{"class": "File", "path": "/scratch/update/model"}]}])
def test_without_a_listing_to_load_nothing_is_asked(listing: dict):
    assert update(without_listing(utils.update_file_token), TOKEN | listing, LoadListing.no_listing) == TOKEN


def test_a_listing_that_is_wanted_is_asked_for():
    with pytest.raises(Asked):
        update(without_listing(utils.update_file_token), dict(TOKEN), LoadListing.shallow_listing)


def test_streamflow_itself_asks_though_none_is_to_be_loaded():
    """The finding; when it ends, so can this module."""
    original = getattr(utils.update_file_token, "__wrapped__", utils.update_file_token)
    with pytest.raises(Asked):
        update(original, dict(TOKEN), LoadListing.no_listing)

"""The registry's table."""

from __future__ import annotations

import re

import pytest

from gpclml.datasets import uci_source, uci_sources
from gpclml.errors import UnknownNameError

NAMES = [
    "bike",
    "boston",
    "concrete",
    "energy",
    "kin40k",
    "kin8nm",
    "naval",
    "pol",
    "power",
    "protein",
    "pumadyn32nm",
    "wine-red",
    "wine-white",
    "yacht",
]


def test_names():
    assert sorted(uci_sources()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_pinned_and_complete(name):
    source = uci_source(name)
    assert source.name == name
    assert re.fullmatch(r"[0-9a-f]{64}", source.sha256)
    assert re.fullmatch(
        r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/[\w/.-]+", source.address
    )
    assert source.delimiter in ("comma", "whitespace")
    assert source.target_column in (-1, source.num_features)
    assert source.bytes > 10_000
    assert source.note
    assert source.licence


def test_files_are_distinct():
    sources = uci_sources().values()
    assert len({source.file for source in sources}) == len({s.sha256 for s in sources}) == 14


def test_registry_is_read_only():
    with pytest.raises(TypeError):
        uci_sources()["new"] = uci_source("yacht")


@pytest.mark.parametrize("name", ["wine", None, ["yacht"]])
def test_unknown_name(name):
    with pytest.raises(UnknownNameError, match="wine-red"):
        uci_source(name)

"""Shared fixtures, and what keeps every test to this machine, its own files and no clock."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

# Before torch reads it: matrices are small here, and pytest-xdist has a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from loopback_only import sitecustomize as guard

REAL_DATA = os.environ.get("GPCLML_DATA")

# Deadlines and the check of slow inputs read the clock; fixed examples fail everywhere or nowhere.
hypothesis.settings.register_profile(
    "gpclml",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("gpclml")


@pytest.fixture(scope="session", autouse=True)
def _this_machine_alone(tmp_path_factory):
    """Processes that tests start refuse sockets too, and find no data of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.path.dirname(guard.__file__), prepend=os.pathsep)
        patch.setenv("GPCLML_DATA", str(tmp_path_factory.mktemp("no-data")))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        yield


@pytest.fixture(autouse=True)
def refusals():
    """What the guard refused; a test fails that leaves some, also where its code hid the error."""
    guard.refusals.clear()
    yield guard.refusals
    assert not guard.refusals, f"the test tried to leave this machine: {guard.refusals}"


@pytest.fixture(autouse=True)
def _seed_torch():
    """No test depends on the order in which tests run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data named by GPCLML_DATA; what asks for it is marked ``data``."""
    if not REAL_DATA or not Path(REAL_DATA).is_dir():
        pytest.skip("needs real data: name their folder by GPCLML_DATA")
    return Path(REAL_DATA).absolute()


def pytest_collection_modifyitems(items):
    for test in items:
        if "data_folder" in test.fixturenames and not test.get_closest_marker("data"):
            raise pytest.UsageError(f"{test.nodeid} reads real data: mark it `data`")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> torch.device:
    """Every device at hand."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def interruptible():
    """SIGINT interrupts, here and in child processes, also where the caller ignores it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("interrupts reach the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

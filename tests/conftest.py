"""Shared fixtures."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed_torch():
    """No test depends on the order in which tests run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data named by GPCLML_DATA."""
    folder = os.environ.get("GPCLML_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GPCLML_DATA is not set to a folder of data")
    return Path(folder)


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)],
)
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

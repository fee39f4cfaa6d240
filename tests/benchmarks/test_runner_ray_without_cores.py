"""A Ray cluster that loses its cores, by a stand-in for Ray, which need not be installed."""

from __future__ import annotations

import types

import pytest

from benchmarks import _ray
from gpclml.errors import ArgumentError


class Cluster:
    """As much of Ray as a pool uses: so many tasks end, then there are no cores."""

    exceptions = types.SimpleNamespace(
        RayError=RuntimeError, WorkerCrashedError=RuntimeError, OutOfMemoryError=RuntimeError
    )

    def __init__(self, answers):
        self.answers, self.calls = answers, 0

    def remote(self, **options):
        return lambda function: types.SimpleNamespace(remote=self.submit)

    def submit(self, *arguments):
        self.calls += 1
        return self.calls

    def cluster_resources(self):
        return {"CPU": 1.0} if self.calls <= self.answers else {"memory": 1.0}

    def wait(self, calls, timeout):
        ended = [call for call in calls if call <= self.answers]
        return ended[:1], [call for call in calls if call not in ended[:1]]

    def get(self, call):
        return f"answer {call}"


def test_a_cluster_without_cores_is_refused(monkeypatch):
    monkeypatch.setattr(_ray, "WORKER_SECONDS", 0.1)
    pool = _ray.RayPool(Cluster(answers=0))
    with pytest.raises(ArgumentError, match=r"without cores for 0\.1 s.*ray start"):
        pool.check(types.SimpleNamespace(check=None))


def test_a_run_whose_cores_are_gone_ends_after_what_was_computed(monkeypatch):
    monkeypatch.setattr(_ray, "WORKER_SECONDS", 0.1)
    answers = _ray.RayPool(Cluster(answers=3)).run(None, iter("abcde"))
    found = []
    with pytest.raises(ArgumentError, match="repeat the call"):
        found.extend(answers)
    assert found == [("a", "answer 1"), ("b", "answer 2"), ("c", "answer 3")]

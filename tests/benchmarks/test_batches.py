import pytest

from benchmarks._batches import Batches, group, kinds_of
from gpclml.errors import ArgumentError


def _batches(label=lambda cell: cell["n"], size=lambda cell: 2):
    return Batches(lambda cells: [], label, size)


def _groups(labels, size):
    plan = {str(place): f'{{"n":{label}}}' for place, label in enumerate(labels)}
    return group(plan, kinds_of(plan, _batches(size=size)))


def test_groups_are_of_one_label_full_and_in_order():
    assert _groups([5, 7, 5, 5, 7], lambda cell: 2) == [["0", "2"], ["1", "4"], ["3"]]


def test_cells_of_size_one_stay_alone():
    assert _groups([5, 7, 5, 7], lambda cell: 1 if cell["n"] == 5 else 9) == [
        ["0"], ["1", "3"], ["2"],
    ]  # fmt: skip


def test_without_batches_all_stay_alone():
    plan = {"a": '{"n":1}', "b": '{"n":1}'}
    assert group(plan, kinds_of(plan, None)) == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size": lambda cell: 0}, r"batches\.size"),
        ({"size": lambda cell: 1.5}, r"batches\.size"),
        ({"label": lambda cell: [cell["n"]]}, r"batches\.label"),
    ],
)
def test_bad_batches_are_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        kinds_of({"a": '{"n":1}'}, _batches(**options))

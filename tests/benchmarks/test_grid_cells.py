import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.runner.cells import Batches, canonical_json, cell_key, group_cells, plan_cells
from gpclml.errors import ArgumentError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)
)
configurations = st.dictionaries(st.text(max_size=5), values, max_size=5)


@settings(deadline=None, max_examples=60)
@given(configurations, st.randoms(use_true_random=False))
def test_key_does_not_depend_on_order(configuration, random):
    items = list(configuration.items())
    random.shuffle(items)
    assert cell_key(dict(items), "v") == cell_key(configuration, "v")


@settings(deadline=None, max_examples=60)
@given(configurations, configurations)
def test_key_differs_where_configurations_differ(one, other):
    same = canonical_json(one) == canonical_json(other)
    assert (cell_key(one, "v") == cell_key(other, "v")) == same


@settings(deadline=None, max_examples=60)
@given(configurations, st.text(max_size=5), values)
def test_key_changes_with_any_setting(configuration, name, value):
    changed = configuration | {name: value}
    if name in configuration and canonical_json(configuration[name]) == canonical_json(value):
        assert cell_key(changed, "v") == cell_key(configuration, "v")
    else:
        assert cell_key(changed, "v") != cell_key(configuration, "v")


@settings(deadline=None, max_examples=60)
@given(configurations, st.text(max_size=5), st.text(max_size=5))
def test_key_changes_with_code_version(configuration, one, other):
    assert (cell_key(configuration, one) == cell_key(configuration, other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (None, "null"), ("1", 1), ([], {})]
)
def test_key_tells_look_alikes_apart(one, other):
    assert cell_key({"a": one}, "v") != cell_key({"a": other}, "v")


@settings(deadline=None, max_examples=60)
@given(st.floats())
def test_floats_return_exactly(value):
    back = json.loads(canonical_json({"a": value}))["a"]
    assert math.isnan(back) if math.isnan(value) else back.hex() == value.hex()


def test_plan_keeps_the_order_and_drops_repeats():
    cells = [{"b": 2, "a": 1}, {"a": 0}, {"a": 1, "b": 2}]
    assert [json.loads(cell.configuration) for cell in plan_cells(cells, "v")] == [
        {"a": 1, "b": 2},
        {"a": 0},
    ]


def test_a_grid_without_cells_is_refused():
    with pytest.raises(ArgumentError, match="at least one"):
        plan_cells([], "v")


def _batches(label=lambda cell: cell["n"], size=lambda cell: 2):
    return Batches(lambda cells: [], label, size)


def _groups(labels, batches):
    """Places of cells with these labels, in groups."""
    cells = plan_cells(({"n": label, "place": place} for place, label in enumerate(labels)), "v")
    return [
        [json.loads(cell.configuration)["place"] for cell in group]
        for group in group_cells(cells, batches)
    ]


def test_groups_are_of_one_label_full_and_in_order():
    assert _groups([5, 7, 5, 5, 7], _batches()) == [[0, 2], [1, 4], [3]]


def test_cells_of_size_one_stay_alone():
    batches = _batches(size=lambda cell: 1 if cell["n"] == 5 else 9)
    assert _groups([5, 7, 5, 7], batches) == [[0], [1, 3], [2]]


def test_without_batches_all_stay_alone():
    assert _groups([1, 1], None) == [[0], [1]]

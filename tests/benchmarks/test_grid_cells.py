import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._cells import canonical_json, cell_key, plan_cells
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
    assert [json.loads(text) for text in plan_cells(cells, "v").values()] == [
        {"a": 1, "b": 2},
        {"a": 0},
    ]


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        ([], "at least one"),
        ([{"a": 1}, "b"], r"cells\[1\].*a dictionary"),
        ([{"a": object()}], r"cells\[0\].*JSON values"),
        ([{"a": {1: 2}}], "not a string"),
        ([{"a": [{1: 2}]}], "not a string"),
        ([{"_seconds": 2}], "underscore"),
    ],
)
def test_bad_cells_are_refused(cells, match):
    with pytest.raises(ArgumentError, match=match):
        plan_cells(cells, "v")

"""Values and gradients of many models and objectives are those of the stored record."""

import pytest
import torch
from record_cases import CASES, FLOAT32, FLOAT64, differences, evaluate, read, tolerance

RECORD = read()
IN_FLOAT32 = [name for name in CASES if RECORD[name]["float32"] is not None]


def beyond(limit, result, stored):
    """The tensors that are farther than the limit from the stored ones."""
    named = differences(result, stored).items()
    return {name: difference for name, difference in named if not difference <= limit}  # NaN too


def test_no_case_is_lost():
    assert len(CASES) >= 324


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    result = evaluate(CASES[name])
    assert not beyond(tolerance(CASES[name]), result, RECORD[name]["tensors"])


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_float32_is_near_the_values_of_float64(name):
    """Where it was not within the tolerance, because of the conditioning, it is no farther off."""
    result = evaluate(CASES[name], torch.float32)
    stored = RECORD[name]["float32"]
    # Near the tolerance, another machine's rounding may be on the other side of it.
    limit = FLOAT32 if stored < 0.5 * FLOAT32 else FLOAT32 + 2 * stored
    assert not beyond(limit, result, RECORD[name]["tensors"])


def test_a_small_change_is_seen():
    """In the value, and in any gradient that is not far smaller than the others."""
    name = "rbf_ard lml fixed d=2 n=20 priors again"
    result, stored = evaluate(CASES[name]), RECORD[name]["tensors"]
    assert len(result) == 5
    for changed, values in result.items():
        for other in (values * (1 + 1e-8), values * float("nan")):
            assert list(beyond(FLOAT64, {**result, changed: other}, stored)) == [changed]
        assert beyond(FLOAT64, {**result, changed: values[:-1]}, stored)

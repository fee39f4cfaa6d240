import pytest
import torch
from sklearn.datasets import load_diabetes


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True, scaled=False)
    return torch.tensor(x), torch.tensor(y)


@pytest.fixture(scope="module")
def train(diabetes):
    return diabetes[0][:60], diabetes[1][:60]


@pytest.fixture(scope="module")
def new_x(diabetes):
    return diabetes[0][60:70]

"""An objective that is loaded from a state_dict draws on from where it was saved."""

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

from gpclml.conditioning import RandomOrderings
from gpclml.curvature import Full
from gpclml.errors import ArgumentError
from gpclml.kernels.networks import MLP
from gpclml.mlls import ConditionalMarginalLogLikelihood, LaplaceMarginalLogLikelihood
from gpclml.models import GPRegression, LinearizedNetwork

N = 30


def data(outputs=1):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    return x, (torch.sin(4 * x[:, :1]) + 0.3 * noise).squeeze(-1)


def conditional(conditioning=None):
    model = GPRegression(*data())
    return ConditionalMarginalLogLikelihood(model.likelihood, model, conditioning)


def orderings():
    return conditional(RandomOrderings(3, m=10))


def two_models():
    model = gpytorch.models.IndependentModelList(conditional().model, conditional().model)
    kind = ConditionalMarginalLogLikelihood
    return gpytorch.mlls.SumMarginalLogLikelihood(model.likelihood, model, kind)


def laplace():
    network = MLP([2, 5, 3], generator=torch.Generator().manual_seed(0)).double()
    model = LinearizedNetwork(network)
    likelihood = GaussianLikelihood().double()
    return LaplaceMarginalLogLikelihood(likelihood, model, N, Full(), outputs="single")


def value(mll):
    mll.train()
    if isinstance(mll, LaplaceMarginalLogLikelihood):
        x, y = data(outputs=3)
        return mll(mll.model(x), y)
    inputs = mll.model.train_inputs
    return mll(mll.model(*inputs), mll.model.train_targets)


OBJECTIVES = [conditional, orderings, two_models, laplace]


def adam_steps(mll, steps, optimizer_state=None):
    """Values of so many Adam steps."""
    optimizer = torch.optim.Adam([p for p in mll.parameters() if p.requires_grad], lr=0.05)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        objective = value(mll)
        (-objective).backward()
        optimizer.step()
        history.append(objective.detach())
    return history, optimizer.state_dict()


@pytest.mark.parametrize("make", OBJECTIVES)
def test_a_resumed_loop_is_an_uninterrupted_one_bit_for_bit(make, tmp_path):
    whole = make()
    expected, _ = adam_steps(whole, 9)
    assert len({float(objective) for objective in expected}) == 9
    first = make()
    history, optimizer = adam_steps(first, 4)
    torch.save({"mll": first.state_dict(), "optimizer": optimizer}, tmp_path / "loop.pt")
    value(first)  # what happens to it afterwards does not reach what was saved
    saved = torch.load(tmp_path / "loop.pt", weights_only=True)
    resumed = make()
    resumed.load_state_dict(saved["mll"])
    history += adam_steps(resumed, 5, saved["optimizer"])[0]
    assert all(map(torch.equal, history, expected))
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize("make", OBJECTIVES)
def test_a_state_without_draws_loads_and_leaves_them_where_they_are(make):
    whole, loaded = make(), make()
    for mll in (whole, loaded):
        value(mll)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1)
    state = whole.state_dict()
    draws = [name for name in state if name.endswith("_extra_state")]
    assert len(draws) == (2 if make is two_models else 1)
    loaded.load_state_dict({name: entry for name, entry in state.items() if name not in draws})
    assert torch.equal(value(loaded), value(whole))


def test_the_state_of_gpytorchs_objective_loads():
    model = GPRegression(*data()).double()
    model.likelihood.noise = 0.37
    gpytorchs = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    mll = conditional()
    mll.load_state_dict(gpytorchs.state_dict())
    assert float(mll.likelihood.noise.detach()) == pytest.approx(0.37)
    assert torch.equal(value(mll), value(ConditionalMarginalLogLikelihood(model.likelihood, model)))


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, dtype=torch.uint8), None, "seed"])
def test_what_is_no_state_of_a_generator_is_refused(bad):
    mll = conditional()
    with pytest.raises(ArgumentError, match=r"state of a torch\.Generator"):
        mll.load_state_dict(mll.state_dict() | {"_extra_state": bad})

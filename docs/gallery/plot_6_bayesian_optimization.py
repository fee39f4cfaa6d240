"""# A loop of BoTorch

Bayesian optimization fits a GP after each evaluation. Here BoTorch's loop minimizes the Branin
function with its own fits and with those of this library, which take less time for the same
models.
"""

# %%
# ## The loop
#
# One line differs from BoTorch's tutorials: `optimizer=fit_gpytorch_mll_fused`.
import time
import warnings

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.fit import fit_gpytorch_mll_fused

problem = Branin(negate=True).to(torch.float64)
unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def evaluate(points):
    return problem(problem.bounds[0] + points * (problem.bounds[1] - problem.bounds[0]))[:, None]


def loop(evaluations, **options):
    torch.manual_seed(0)
    x = torch.rand(6, 2, dtype=torch.float64)
    y, seconds = evaluate(x), 0.0
    for _ in range(evaluations):
        model = SingleTaskGP(x, y)
        start = time.perf_counter()
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **options)
        seconds += time.perf_counter() - start
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            new, _ = optimize_acqf(
                LogExpectedImprovement(model, y.max()), unit, q=1, num_restarts=4, raw_samples=64
            )
        x, y = torch.cat([x, new]), torch.cat([y, evaluate(new)])
    return x, y, seconds


results = {
    "BoTorch's optimizer": loop(15),
    "fit_gpytorch_mll_fused": loop(15, optimizer=fit_gpytorch_mll_fused),
}

# %%
# ## The best value so far
#
# The optimum is -0.398. How much time a fit takes depends on the machine; `python -m
# benchmarks.speed run --study loops` measures it.
fig, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
for style, (name, (_, y, _)) in zip(("-", "--"), results.items(), strict=True):
    axes.plot(problem.optimal_value - y.cummax(0).values[:, 0], style, label=name)

axes.set(xlabel="evaluations", ylabel="regret", yscale="log")
axes.legend(frameon=False)
times = {name: seconds for name, (_, _, seconds) in results.items()}
own, fused = times.values()
print(f"fits by fit_gpytorch_mll_fused took less time: {fused < own}")

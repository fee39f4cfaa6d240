from gpytorch.kernels import LinearKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.datasets import load
from gpclml.evaluation import plot_compare, score_models
from gpclml.fit import fit_mll
from gpclml.models import GPRegression

data = load("diabetes")
x, y = data.inputs[:200], data.targets[:200]
models = {}
for name, kernel in {"linear": LinearKernel(), "rbf": "rbf", "matern": "matern"}.items():
    models[name] = GPRegression(x, y, kernel=kernel)
    fit_mll(ExactMarginalLogLikelihood(models[name].likelihood, models[name]), progress=False)

comparison = score_models(models, seed=0)
print(comparison)
plot_compare(comparison).figure.savefig("comparison.png", dpi=150)

from gpytorch.kernels import LinearKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from sklearn.datasets import load_diabetes

from gpclml.evaluation import plot_compare, score_models
from gpclml.fit import fit_mll
from gpclml.models import GPRegression

x, y = load_diabetes(return_X_y=True, scaled=False)
models = {}
for name, kernel in {"linear": LinearKernel(), "rbf": "rbf", "matern": "matern"}.items():
    models[name] = GPRegression(x[:200], y[:200], kernel=kernel)
    fit_mll(ExactMarginalLogLikelihood(models[name].likelihood, models[name]), progress=False)

comparison = score_models(models, seed=0)
print(comparison)
plot_compare(comparison).figure.savefig("comparison.png", dpi=150)

from sklearn.datasets import load_diabetes

from gpclml import ExactMarginalLogLikelihood, GPRegression, fit_mll, marginal_log_predictive
from gpclml.kernels import FeatureKernel, PolynomialFeatures

x, y = load_diabetes(return_X_y=True, scaled=False)
linear = FeatureKernel(PolynomialFeatures(degree=1), prior_variance=0.1)  # of standardized inputs
for kernel in ("matern", "rbf", "rq", linear):
    model = GPRegression(x[:300], y[:300], kernel)
    fit_mll(ExactMarginalLogLikelihood(model.likelihood, model), progress=False)
    density = marginal_log_predictive(model, x[300:], y[300:]).mean()
    name = kernel if isinstance(kernel, str) else "linear"
    print(f"{name:6s} {density:.3f} nats a test row")

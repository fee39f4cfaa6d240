from gpclml.datasets import load, split
from gpclml.evaluation import marginal_log_predictive
from gpclml.fit import fit_mll
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression

data = load("diabetes")  # 442 patients, 10 columns; ships with scikit-learn
train, test = split(data, seed=0).train, split(data, seed=0).test
x, y = data.inputs, data.targets

model = GPRegression(x[train], y[train], kernel="rbf")
mll = ConditionalMarginalLogLikelihood(model.likelihood, model)
fit_mll(mll, progress=False)

predicted = model.predict(x[test])  # original units
error = (predicted.mean - y[test]).square().mean().sqrt().item()
density = marginal_log_predictive(model, x[test], y[test]).mean().item()
print(f"test RMSE {error:.1f}, test log density {density:.2f} nats a point")

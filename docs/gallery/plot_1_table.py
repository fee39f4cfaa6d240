"""# From a table to a decision

You have a table of measurements and want to predict one column of new rows: what will it be, how
certain is that, and which columns matter?
"""

# %%
# ## Fit the default model
#
# `Regressor` fits several Gaussian processes, weights them by how well each predicts rows that it
# has not seen, and calibrates the intervals. It takes arrays and data frames, like other
# scikit-learn estimators.
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from gpclml import Regressor

table = load_diabetes(as_frame=True, scaled=False)
x, new_x, y, new_y = train_test_split(table.data, table.target, test_size=142, random_state=0)
regressor = Regressor(random_state=0).fit(x, y)
regressor.stack_.summary()[["weight", "loo", "seconds"]].round(3)

# %%
# ## Predictions with intervals
#
# Patients are sorted by their prediction. The band should contain nine of ten of them.
import matplotlib.pyplot as plt
import numpy as np

mean, limits = regressor.predict(new_x, quantiles=[0.05, 0.95])
order = np.argsort(mean)
inside = ((new_y > limits[:, 0]) & (new_y < limits[:, 1])).to_numpy()
fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
axes.fill_between(range(len(mean)), *limits[order].T, alpha=0.3, label="90 % interval")
axes.plot(mean[order], label="prediction")
axes.scatter(range(len(mean)), new_y.to_numpy()[order], s=9, color="k", label="patient")
axes.set(xlabel="test rows, sorted by prediction", ylabel="disease progression")
axes.legend(ncols=3, frameon=False, loc="upper left")
print(f"{100 * inside.mean():.0f} % of {len(new_y)} test rows are inside")

# %%
# ## Is it any good?
#
# Beside the mean of the targets and boosted trees, on the same rows:
from sklearn.ensemble import HistGradientBoostingRegressor

trees = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(new_x)
for name, predicted in {"mean": y.mean(), "trees": trees, "regressor": mean}.items():
    print(f"{name:9s} is off by {np.sqrt(np.mean((new_y - predicted) ** 2)):.1f}")

# %%
# ## Which columns matter
#
# The lengthscale of a column is the distance over which the target changes. A column matters more
# the shorter its lengthscale is, in units of the column's spread. `summary` gives lengthscales in
# these units (`value`) and in those of the table (`original`).
from gpclml import ConditionalMarginalLogLikelihood, GPRegression, LastPoints, fit_mll

model = GPRegression(x, y, "matern")
fit_mll(ConditionalMarginalLogLikelihood(model.likelihood, model, LastPoints(m=0)))
lengthscales = model.summary().filter(like="lengthscale", axis=0).sort_values("value")
print(lengthscales.head(4).round(2))
fig, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
names = [name.partition("[")[2].rstrip("]") for name in lengthscales.index]
axes.bar(names, 1 / lengthscales["value"])
axes.set_ylabel("1 / lengthscale")

import numpy as np
from sklearn.datasets import load_diabetes

from gpclml import Regressor

table, target = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
table["region"] = np.where(table.age > 50, "north", "south")  # categories become inputs

model = Regressor(candidates=("linear", "matern", "rbf")).fit(table[:150], target[:150])
mean, limits = model.predict(table[150:], quantiles=(0.05, 0.95))
inside = (limits[:, 0] < target[150:]) & (target[150:] < limits[:, 1])
print("R2 of new rows:", round(model.score(table[150:], target[150:]), 1))
print("new rows within their 90 % intervals:", round(float(inside.mean()), 1))
print("log density of a new row:", end=" ")
print(round(float(model.predict_distribution(table[150:]).log_density(target[150:]).mean()), 1))

print(model.stack_.summary()[["weight"]].round(1).sort_index().to_string())

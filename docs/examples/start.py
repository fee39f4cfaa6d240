from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from gpclml import Regressor

x, y = load_diabetes(return_X_y=True)  # 442 patients, 10 columns
x, new_x, y, new_y = train_test_split(x, y, test_size=142, random_state=0)
regressor = Regressor(candidates=("linear", "matern"), random_state=0).fit(x, y)

mean, limits = regressor.predict(new_x, quantiles=(0.05, 0.95))
print(f"the first patient: {mean[0]:.0f}, between {limits[0, 0]:.0f} and {limits[0, 1]:.0f}")
inside = (limits[:, 0] < new_y) & (new_y < limits[:, 1])
print(f"targets within their 90 % intervals: {100 * inside.mean():.0f} %")

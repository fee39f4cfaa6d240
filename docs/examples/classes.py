from sklearn.datasets import load_breast_cancer
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from gpclml import Classifier

data = load_breast_cancer(as_frame=True)
labels = data.target.map({0: "malignant", 1: "benign"})
train, new, known, truth = train_test_split(data.data, labels, train_size=100, random_state=0)

model = Classifier().fit(train, known)
probabilities = model.predict_proba(new)  # columns in the order of model.classes_
print("share of new rows with the right class:", round(model.score(new, truth), 2))
print("log loss:", round(log_loss(truth, probabilities), 2))
sure = probabilities.max(1) > 0.9
right = model.predict(new[sure]) == truth[sure]
print(f"of {sure.mean():.0%} with a probability above .9 are right: {right.mean():.0%}")

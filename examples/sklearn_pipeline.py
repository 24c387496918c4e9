"""A private classifier in a scikit-learn pipeline: declared scaling, groups, a ledger that verifies, and a report."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import evenhand as eh
from evenhand.sklearn import DeclaredScaler, PrivateClassifier, make_private_pipeline

X, y = load_digits(return_X_y=True)
groups = np.array([f"digit {label}" for label in y])
X_train, X_test, y_train, y_test, train_groups, test_groups = train_test_split(
    X, y, groups, test_size=0.25, stratify=y, random_state=0
)

pipeline = make_private_pipeline(
    DeclaredScaler((0, 16)),  # four bits a pixel: known without looking at a picture
    PrivateClassifier("mlp", epsilon=3.0, delta=1e-5, classes=range(10), goal="worst", epochs=20, batch_size=128),
)
pipeline.fit(X_train, y_train, groups=train_groups, test=(X_test, y_test, test_groups))

answers = pipeline.predict(X_test)
print(f"{np.mean(answers == y_test):.1%} of {len(y_test)} held-out pictures are recognised")
for name in np.unique(test_groups):
    of_group = test_groups == name
    print(f"  {name}: {np.mean(answers[of_group] == y_test[of_group]):.1%} of {of_group.sum()}")
print(str(pipeline.privacy_).splitlines()[0])

run = pipeline[-1].run_
assert eh.verify(run.path)["ok"]
print(run.report().save(run.path / "report.html"))

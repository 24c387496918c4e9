"""Right and wrong uses of evenhand, for type checkers only: nothing here is run.

A wrong use carries ``type: ignore``. mypy in strict mode, and pyright as tests/house/test_types.py calls it, complain
about an ignore that suppresses nothing: so every one of these lines is an error in a user's project.
"""

from typing import Any, assert_type

import torch

import evenhand as eh
from evenhand.accounting.plan import Plan
from evenhand.mechanism.audit.result import Audit
from evenhand.training.private import Private
from evenhand.training.run import Run

model = torch.nn.Linear(64, 10)
train, test = eh.data.digits()
promise = eh.Budgets({"strict": 1, "open": 8}, delta=1e-5)

run = eh.fit(model, train, epsilon=3.0, epochs=1, test=test, goal="balanced")
assert_type(run, Run)
assert_type(eh.resume("runs/first"), Run)
assert_type(eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=train.facts, epochs=1, batch_size=128), Plan)
assert_type(eh.epsilon([(0.01, 1.0, 1000)], delta=1e-5), float)
assert_type(eh.accounting.epsilon([(0.01, 1.0, 1000)], delta=1e-5), float)
assert_type(eh.audit(run), Audit)
assert_type(eh.verify("runs/first"), dict[str, Any])
assert_type(eh.data.wrap((torch.zeros(2, 64), torch.zeros(2, dtype=torch.long))), eh.data.Data)
assert_type(eh.rules.Clip(), eh.rules.Clip)
assert_type(eh.Method(eh.rules.Clip(), schedule=eh.schedules.Step(decay=0.5, every=1)), eh.methods.Method)
assert_type(eh.losses.CrossEntropy(smoothing=0.1), eh.losses.CrossEntropy)
assert_type(eh.testing.check(eh.rules.Clip()), eh.testing.Findings)
assert_type(eh.density.MomentDensity(), eh.density.MomentDensity)
assert_type(eh.sklearn.PrivateClassifier("linear"), eh.sklearn.PrivateClassifier)
schedule = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.9)
eh.fit(model, train, test=test, epsilon=3.0, callbacks=[eh.Callback()], stop=eh.EarlyStopping("accuracy", patience=2))
eh.attach(model, schedule.optimizer, eh.losses.CrossEntropy(), resume="runs/first", extras={"schedule": schedule})
with eh.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), eh.losses.CrossEntropy(), run.plan, out="r") as mine:
    assert_type(mine, Private)

eh.fit(model, train, epsilonn=3.0)  # type: ignore[call-arg]
eh.fit(model, train, epsilon="three")  # type: ignore[arg-type]
eh.fit(model, train, goal=1)  # type: ignore[arg-type]
eh.EarlyStopping(patienc=2)  # type: ignore[call-arg]
eh.fitt(model, train, epsilon=3.0)  # type: ignore[attr-defined]
eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=train, epochs=1)  # type: ignore[arg-type]
eh.Privacy(3, deltaa=1e-5)  # type: ignore[call-arg]
eh.Budgets(["strict"], delta=1e-5)  # type: ignore[arg-type]
eh.epsilon([(0.01, 1.0, 1000)])  # type: ignore[call-arg]
eh.data.wrapp(train)  # type: ignore[attr-defined]
eh.rules.Clipp()  # type: ignore[attr-defined]
eh.rules.AutoS(gama=0.1)  # type: ignore[call-arg]
eh.schedules.Step(decay="fast")  # type: ignore[arg-type]
eh.losses.Focal(gamma="2")  # type: ignore[arg-type]
eh.accounting.epsilonn([], delta=1e-5)  # type: ignore[attr-defined]
eh.methods.Ruel  # type: ignore[attr-defined]  # noqa: B018 - a misspelt name
eh.testing.chek(eh.rules.Clip())  # type: ignore[attr-defined]
eh.density.MomentDensity(epsilonn=3.0)  # type: ignore[call-arg]
run.privcy  # type: ignore[attr-defined]  # noqa: B018 - a misspelt name

"""Stop a private loop in the middle, and go on in another process, with what was charged still charged."""

import sys

import torch

import evenhand as eh

out = sys.argv[1] if len(sys.argv) > 1 else "runs/own"
train, test = eh.data.digits()
loss = torch.nn.CrossEntropyLoss(reduction="none")


def begin():
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


model, optimizer, schedule = begin()
plan = eh.plan("dpsgd", eh.Privacy(3.0, delta=1e-5), data=train.facts, epochs=3, batch_size=128)
with eh.attach(model, optimizer, loss, plan, out=out, extras={"schedule": schedule}) as private:
    for batch in next(private.epochs(train)):
        private.step(batch)
    schedule.step()
    private.checkpoint()
    print(f"stopped at step {private.position} of {plan.steps}: epsilon so far {private.epsilon:.2f}")

model, optimizer, schedule = begin()
with eh.attach(model, optimizer, loss, resume=out, extras={"schedule": schedule}) as private:
    for epoch in private.epochs(train):
        for batch in epoch:
            private.step(batch)
        schedule.step()
    private.release()
run = eh.load(out, model=model)
print(run.privacy)
run.report(test).save(f"{out}/report.html")
assert eh.verify(out)["ok"]

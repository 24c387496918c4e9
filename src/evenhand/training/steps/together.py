"""Facts that the processes of a run must have in common before anything is spent, by what an error calls them."""

from __future__ import annotations

import hashlib
import re

import torch
from torch.utils._pytree import tree_leaves

from evenhand._versions import software
from evenhand.accounting.plan import Plan
from evenhand.data.dataset import Data
from evenhand.data.fingerprint import assignment, identity

_READ = 64
"""Records whose inputs and targets are compared between processes."""


def facts_of_run(
    plan: Plan, optimizer: torch.optim.Optimizer, insecure_seed: int | None, **further: object
) -> dict[str, str]:
    """Return what is known before data are read; ``further`` objects are compared by what they print.

    Examples:
      >>> import evenhand as eh
      >>> facts = eh.data.digits()[0].facts
      >>> plan = eh.plan("dpsgd", eh.Privacy(3), data=facts, epochs=1, batch_size=128)
      >>> sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
      >>> facts_of_run(plan, sgd, None, loss=torch.nn.CrossEntropyLoss())["loss"]
      'CrossEntropyLoss()'
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    facts = {
        "versions of the software": repr(sorted(software().items())),
        "plan": plan.digest,
        "insecure seed": repr(insecure_seed),
        "optimizer": repr((type(optimizer).__qualname__, settings)),
        **{name: repr(value) for name, value in further.items()},
    }
    return {name: re.sub(r" at 0x[0-9a-f]+", "", text) for name, text in facts.items()}


def facts_of_data(data: Data) -> dict[str, str]:
    """Return what tells whether two processes have the same records, in the same order, of the same owners."""
    digest = hashlib.sha256(data.by_record.group.cpu().contiguous().numpy().tobytes())
    records = data.by_record
    rows = torch.linspace(0, len(records) - 1, min(_READ, len(records))).long()
    for leaf in tree_leaves(records.fetch(rows)):
        digest.update(repr(leaf.tolist() if isinstance(leaf, torch.Tensor) else "").encode())
    return {"data": f"{identity(data)} {assignment(data)} {digest.hexdigest()}"}

"""How long a plan will take, measured before anything is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenhand.gradients import MicroBatches
from evenhand.gradients.batch_utils import buffers_restored
from evenhand.gradients.pass_context import preserved
from evenhand.guards import Compute
from evenhand.mechanism.random_streams import Stream

if TYPE_CHECKING:
    from evenhand.data import Data
    from evenhand.mechanism.make_plan import Plan


def seconds(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], plan: Plan, data: Data, compute: Compute | None = None
) -> float:
    """Estimated duration of all steps: one pass over a batch of the expected size, and one draw of noise.

    Nothing is updated, released or charged: gradients are computed and thrown away, the noise comes from a key of its
    own, and buffers and random state are put back. What is printed depends on shapes, not on what the records say.

    Examples:
      >>> import evenhand as eh
      >>> train, _ = eh.data.digits()
      >>> plan = eh.plan("dpsgd", eh.Privacy(3), data=train.facts, epochs=1)
      >>> seconds(nn.Linear(64, 10), nn.CrossEntropyLoss(reduction="none"), plan, train) > 0
      True
    """
    rows = torch.arange(min(len(data), max(1, round(plan.expected_batch))))
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    chosen = compute or Compute()
    engine = MicroBatches(model, loss, lean=chosen.lean, limit=chosen.micro_batch)

    def step() -> None:
        result = engine.run(*data.fetch(rows))
        result.weighted_sum(torch.ones_like(result.norm))
        Stream.fresh().normals("gradient", 0, count)

    with preserved(model), buffers_restored(model):
        step()
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * plan.steps


def words(duration: float) -> str:
    """A duration as people say it.

    Examples:
      >>> words(0.4), words(75), words(5400)
      ('about a second', 'about 75 seconds', 'about 90 minutes')
    """
    if duration < 1.5:
        return "about a second"
    if duration < 100:
        return f"about {duration:.0f} seconds"
    if duration < 6000:
        return f"about {duration / 60:.0f} minutes"
    return f"about {duration / 3600:.1f} hours"

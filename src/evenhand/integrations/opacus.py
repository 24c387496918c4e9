"""A ``PrivacyEngine`` with the interface of Opacus: its loops run with one import changed.

Sampling, clipping, noise, charge and ledger are evenhand's. The loop's own forward keeps nothing but outputs, its
backward ends there and serves as a check; ``optimizer.step()`` is one step of the run. Opacus itself is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from evenhand.accounting.budgets import FixedNoise, Privacy, Promise
from evenhand.accounting.plan import Plan
from evenhand.errors import UsageError
from evenhand.gradients.doctor.fixes import fix
from evenhand.gradients.doctor.refusals import refuse_wrapped
from evenhand.integrations import opacus_arguments as mapped
from evenhand.integrations.opacus_loop import Loop
from evenhand.mechanism.make_plan import plan as make_plan
from evenhand.training.attach import attach
from evenhand.training.fit import new_folder
from evenhand.training.guards.model_guards import check_optimizer

__all__ = ["BatchMemoryManager", "DPDataLoader", "DPOptimizer", "PrivacyEngine", "PrivateModule"]


class PrivacyEngine:
    """Make model, optimizer and data loader private, as Opacus' engine does, and say what was spent.

    The run is over after the last planned step; then the model and its statement are in ``folder``, for ``evenhand
    verify`` and ``eh.load``. A loop that ends earlier calls ``release()``.

    Args:
      accountant: "prv", "rdp" and "gdp" are understood; epsilon is evenhand's certified upper bound for all of them.
      secure_mode: True and False are alike: noise and sampling always come from secret AES streams.
      out: the run folder; default a new one in runs/.

    Formal guarantees:
      Those of ``eh.attach``: the loop cannot change who is sampled, the noise or the charge. Its loss is only compared.

    Examples:
      >>> import tempfile
      >>> from torch.utils.data import DataLoader, TensorDataset
      >>> records = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
      >>> model, engine = nn.Linear(4, 2), PrivacyEngine(out=tempfile.mkdtemp())
      >>> model, optimizer, loader = engine.make_private_with_epsilon(
      ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
      ...     data_loader=DataLoader(records, batch_size=16),
      ...     target_epsilon=3.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0)
      >>> for inputs, targets in loader:
      ...     optimizer.zero_grad()
      ...     nn.CrossEntropyLoss()(model(inputs), targets).backward()
      ...     optimizer.step()
      >>> 2.9 < engine.get_epsilon(1e-3) <= 3.0
      True
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False, out: str | Path | None = None) -> None:
        if accountant not in ("prv", "rdp", "gdp"):
            raise UsageError("accountant= is 'prv', 'rdp' or 'gdp', as in Opacus; evenhand's own serves for each.")
        self._secure, self._out = secure_mode, out
        self._loop: Loop | None = None

    def make_private(
        self,
        *,
        noise_multiplier: float,
        target_delta: float = 1e-5,
        epochs: float | None = None,
        **arguments: Unpack[mapped.Arguments],
    ) -> Any:
        """Return private model, optimizer and loader; with ``grad_sample_mode="ghost"`` also the criterion, third.

        Args:
          noise_multiplier: standard deviation of the noise over the clip bound.
          target_delta: the delta of the statement.
          epochs: passes over the data. Opacus counts them afterwards; evenhand fixes and charges them first.
          arguments: as in ``make_private_with_epsilon``.
        """
        if epochs is None:
            raise UsageError(
                "Say how many epochs the loop makes: make_private(..., epochs=10). Opacus counts steps afterwards; "
                "here a plan fixes them before the first. Nothing was spent."
            )
        return self._prepare(FixedNoise(noise_multiplier, target_delta), epochs, **arguments)

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, epochs: float, **arguments: Unpack[mapped.Arguments]
    ) -> Any:
        """Return private model, optimizer and loader, with the noise that spends the promise over all epochs.

        Args:
          target_epsilon: what all steps together spend at most.
          target_delta: probability that this may fail.
          epochs: passes over the data.
          arguments: ``module``, ``optimizer``, ``data_loader``, ``max_grad_norm`` as in Opacus; ``criterion``, whose
            mean over the batch is the loss of the loop (default cross-entropy; log-probabilities with NLLLoss need
            none). What of the rest cannot be mapped is an error that says so.
        """
        return self._prepare(Privacy(target_epsilon, target_delta), epochs, **arguments)

    def _prepare(
        self,
        promise: Promise,
        epochs: float,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: Any,
        max_grad_norm: Any,
        criterion: Any = None,
        noise_generator: torch.Generator | None = None,
        clipping: str = "flat",
        grad_sample_mode: str = "hooks",
        rand_on_empty: bool = False,  # accepted: an empty batch is an ordinary step
        **others: Any,
    ) -> Any:
        if self._loop is not None:
            raise UsageError("This engine has its training: make a new PrivacyEngine. Runs on the same data add up.")
        if noise_generator is not None and self._secure:
            raise UsageError("secure_mode=True and a noise_generator exclude each other: its seed is known.")
        if grad_sample_mode not in mapped.MODES:
            raise UsageError(f"grad_sample_mode={grad_sample_mode!r} has no counterpart: leave it out; one process.")
        method = mapped.method(max_grad_norm, clipping, others)
        mapped.refuse_others(others)
        refuse_wrapped(module)
        check_optimizer(module, optimizer)
        data, per_epoch = mapped.records(data_loader)
        batch = mapped.expected_batch(data.facts.records, per_epoch, epochs)
        plan = make_plan(method, promise, data=data.facts, epochs=epochs, batch_size=batch)
        seed = None if noise_generator is None else noise_generator.initial_seed()
        start = partial(
            attach,
            module,
            optimizer,
            mapped.per_record(criterion),
            plan,
            out=self._out or new_folder(plan),
            insecure_seed=seed,
        )
        self._loop = Loop(module, start, plan, data, criterion)
        wrapped, stepping = PrivateModule(module, self._loop), DPOptimizer(optimizer, self._loop)
        loader = DPDataLoader(data_loader, self._loop, per_epoch)
        if grad_sample_mode == "ghost":
            return wrapped, stepping, criterion or nn.CrossEntropyLoss(), loader
        return wrapped, stepping, loader

    def get_epsilon(self, delta: float) -> float:
        """Return what the steps charged so far spend at this delta; blocks of steps are charged before they run.

        Infinite where no epsilon holds, as after records were found to influence each other.
        """
        loop = self._begun()
        if loop.private is not None and None in loop.private.epsilons.values():
            return math.inf
        charged = 0 if loop.private is None else loop.private.folder.ledger().reserved
        return loop.plan.composed(0, charged).epsilon(delta) if charged else 0.0

    @property
    def accountant(self) -> PrivacyEngine:
        """Return the engine itself: ``engine.accountant.get_epsilon(delta=...)`` is what it spent."""
        return self

    @property
    def plan(self) -> Plan:
        """Return every number that decides privacy."""
        return self._begun().plan

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        private = self._begun().private
        if private is None:
            raise UsageError("There is no run folder before the first batch is drawn from the loader.")
        return private.folder.path

    def release(self) -> None:
        """Write model and statement now. With steps left, the statement says the epsilon of the whole plan."""
        self._begun().release()

    def close(self) -> None:
        """Close a run that is left as it is: nothing is released, what was charged stays charged."""
        if self._loop is not None and self._loop.private is not None:
            self._loop.private.close()

    @staticmethod
    def get_compatible_module(module: nn.Module) -> nn.Module:
        """Return a copy of the model whose layers can be trained privately, see ``eh.gradients.fix``."""
        return fix(module)

    def _begun(self) -> Loop:
        if self._loop is None:
            raise UsageError("Nothing is private yet: call make_private or make_private_with_epsilon first.")
        return self._loop

    def __getattr__(self, name: str) -> Any:
        instead = {
            "is_compatible": "eh.gradients.examine(model, loss, records, labels).trainable",
            "validate": "print(eh.gradients.examine(model, loss, records, labels))",
            "save_checkpoint": "the run folder, which has checkpoints and the ledger of what was spent",
            "load_checkpoint": "the run folder, which has checkpoints and the ledger of what was spent",
        }
        if name in instead:
            raise UsageError(f"PrivacyEngine.{name} has no counterpart here. Use {instead[name]}.")
        raise AttributeError(f"PrivacyEngine has no attribute {name!r}")


class PrivateModule(nn.Module):
    """The model as the loop calls it; all else is the model's own. ``_module`` is the model, as in Opacus."""

    def __init__(self, module: nn.Module, loop: Loop) -> None:
        super().__init__()
        self._module = module
        object.__setattr__(self, "_run", loop)
        self.training = module.training

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the model's outputs."""
        return self._run.forward(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)


class DPOptimizer(torch.optim.Optimizer):
    """The optimizer as the loop calls it: ``step`` is one private step. Learning-rate schedulers work on it."""

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.original_optimizer, self._loop = optimizer, loop
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    @property
    def expected_batch_size(self) -> float:
        """Return the expected number of records per step."""
        return self._loop.plan.expected_batch

    @property
    def noise_multiplier(self) -> float:
        """Return the noise multiplier of the plan's first step; it cannot be set, see ``eh.schedules``."""
        return self._loop.plan.levels[0].noise

    @property
    def max_grad_norm(self) -> float:
        """Return the clip bound of the plan's first step; it cannot be set, see ``eh.schedules``."""
        return self._loop.plan.levels[0].bound

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the private step of the loader's last batch."""
        if closure is not None:
            raise UsageError("A closure would evaluate the batch again: call optimizer.step() without one.")
        self._loop.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from a state."""
        self.original_optimizer.load_state_dict(state_dict)

    def signal_skip_step(self, do_skip: bool = True) -> None:
        """Refuse: a batch of the plan is one step."""
        raise UsageError("A batch is one step. For less memory use BatchMemoryManager from this module.")


class DPDataLoader:
    """A loader whose rows are drawn by the plan's Poisson sampler; each ``for`` over it is one epoch of the plan."""

    def __init__(self, loader: Any, loop: Loop, length: int) -> None:
        self.dataset, self.sample_rate = loader.dataset, loop.plan.rates[0]
        self._loop, self._length = loop, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._loop.batches(self._length):
            inputs = batch.inputs
            yield [*inputs, batch.targets] if isinstance(inputs, tuple) else [inputs, batch.targets]


class BatchMemoryManager:
    """Bound the memory of a step, as Opacus' manager does; the loop gets whole batches all the same.

    Its forward keeps no activations, and the gradients of ``max_physical_batch_size`` records are computed at a time.
    """

    def __init__(self, *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        self._loader = data_loader
        data_loader._loop.limit(max_physical_batch_size)

    def __enter__(self) -> DPDataLoader:
        return self._loader

    def __exit__(self, *_: object) -> None:
        """Leave everything as it is."""

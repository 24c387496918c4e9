"""Settings of a training run: one dataclass, one TOML file, one set of flags, with the same keys."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import _toml, _user_code, _validate
from evenhand._toml import fits, key, literal, tables, words
from evenhand.errors import UsageError
from evenhand.reporting.held_out.small_cells import LEAST
from evenhand.training import trusted_code

if TYPE_CHECKING:
    import torch
    from torch import nn

    from evenhand.data import Data, Declaration
    from evenhand.data.owners_and_groups import Roles
    from evenhand.training.augment import Augment, Views
    from evenhand.training.guards.model_guards import Compute
    from evenhand.training.losses import Loss
    from evenhand.training.optimizers import Descent, OptimizerFactory, SchedulerFactory
    from evenhand.training.weight_average import EMA
    from evenhand.types import Facts

__all__ = [
    "PYTHON",
    "Config",
    "absolute",
    "from_toml",
    "key",
    "literal",
    "merged",
    "of_run",
    "recorded",
    "settings",
    "to_toml",
]

PYTHON = "python"
"""Stands for what was passed to ``fit`` as a Python object and cannot be found again by name: data, model, loss ..."""


@dataclass(frozen=True)
class Config:
    """Settings of ``evenhand train``.

    ``data`` is a built-in source, or a file or image folder of your own; then ``label``, ``labels`` and ``columns``
    declare what is publicly known about it, and ``test_data`` or ``test_share`` says what is held out. ``split_seed``
    (default: ``seed``) keeps that split the same while ``seed`` changes. The files of a built-in source are in
    ``data_dir``; ``source`` holds its options. ``features`` puts what a fixed function makes of each record's inputs in
    their place. ``owners`` and ``groups`` are "label", a column, or a file with one name per record; ``budgets`` has an
    epsilon per owner, ``record_budgets`` is a column or file with an epsilon per record. From ``loss`` to ``precision``
    nothing private depends on a setting. With ``training_records`` held-out data may hold training records, and figures
    stay private; ``allow_not_finite`` trains although many records are not finite. ``prior`` releases noisy counts of
    the labels, paid from the same promise; ``prior_counts`` declares public ones instead. ``goal`` and ``tau`` say whom
    the run serves. Figures of groups with fewer held-out records than ``least_records`` stay private too. ``audit``
    (quick or thorough) attacks the plan's mechanism before the first step.

    Examples:
      >>> Config(epsilon=3.0).method
      'dpsgd'
    """

    data: str = "digits"
    data_dir: str | None = None
    features: str | None = None
    delimiter: str = ","
    label: str | None = None
    labels: Sequence[str] = ()
    groups: str | None = None
    owners: str | None = None
    record_budgets: str | None = None
    missing_tokens: Sequence[str] = ("",)
    ordered: bool = False
    test_data: str | None = None
    test_share: float = 0.2
    keep_together: str | None = None
    persons: str | None = None
    records_per_person: int = 1
    person_cap: int | None = None
    model: str = "mlp"
    device: str = "cpu"
    method: str = "dpsgd"
    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None
    epochs: float = 30.0
    batch_size: float | None = None
    loss: str | None = None
    optimizer: str = "sgd"
    lr: float = 0.2
    lr_schedule: str = "linear"
    momentum: float | None = None
    weight_decay: float | None = None
    average: float | None = None
    augment: str | None = None
    views: int = 1
    micro_batch: int | None = None
    lean: bool = False
    precision: str = "float32"
    seed: int = 0
    split_seed: int | None = None
    insecure_seed: int | None = None
    compose: bool = True
    training_records: bool = False
    allow_not_finite: bool = False
    prior: bool = True
    least_records: int = LEAST
    audit: str | None = None
    prior_counts: Sequence[float] = ()
    goal: str = "overall"
    tau: float | str | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.number(self.epochs, "epochs", low=0)
        _validate.number(self.lr, "lr", low=0)
        _validate.whole(self.seed, "seed", low=0)
        if self.split_seed is not None:
            _validate.whole(self.split_seed, "split_seed", low=0)
        _validate.number(self.test_share, "test_share", low=0, high=1)
        _validate.whole(self.least_records, "least_records", low=0)
        several = _validate.whole(self.records_per_person, "records_per_person") > 1
        if self.persons is None and (several or self.person_cap is not None):
            name = "records_per_person" if several else "person_cap"
            raise UsageError(f"{name} is about persons: name the column that tells them apart, --persons.")
        if self.persons is not None and self.keep_together is not None:
            raise UsageError("Give persons or keep_together: a person's records are kept together by themselves.")
        if self.record_budgets is not None and (self.budgets or self.owners is not None):
            raise UsageError("Give record_budgets alone: each record's own epsilon says which class it belongs to.")
        if {"owners", "owner_shares"} & set(self.source) and (self.owners or self.record_budgets):
            raise UsageError(
                "The options of the source give every record an owner already: leave out owners and budgets."
            )

    @property
    def roles(self) -> tuple[Roles, Roles]:
        """Return where owners, groups and budgets by record come from: columns of the user's file, and other places."""
        from evenhand.data.owners_and_groups import Roles

        asked = Roles(self.owners, self.groups, self.record_budgets)
        return asked.of_table(self.label, self.columns) if self.own_data else (Roles(), asked)

    @property
    def own_data(self) -> bool:
        """Return whether ``data`` is a file or folder of the user."""
        from evenhand.data.sources import is_source

        return self.data != PYTHON and not is_source(self.data)

    def declaration(self) -> Declaration:
        """Return what is declared to be public about the user's own file."""
        from evenhand.data import Declaration
        from evenhand.data.columns import declared

        if not self.columns or self.label is None:
            raise UsageError(
                f"Nothing is declared about {Path(self.data).name}: its label and columns. Start with: "
                f"evenhand init {Path(self.data).name}"
            )
        roles = self.roles[0]
        return Declaration(
            columns={name: declared(name, table) for name, table in self.columns.items()},
            label=self.label,
            labels=self.labels,
            groups=roles.groups,
            owners=roles.owners,
            missing_tokens=self.missing_tokens,
            budgets=roles.budgets,
            ordered=self.ordered,
            keep_together=self.persons or self.keep_together,
        )

    def load_data(self) -> tuple[Data, Data | None]:
        """Return training and held-out data of the named source or file."""
        if self.data == PYTHON:
            raise UsageError(
                "This run was started from Python with its own data, so it is resumed there: eh.resume(RUN, "
                "model=model, train=data, test=held_out); PrivateTrainer: train(resume_from_checkpoint=True)."
            )
        train, test = self._records()
        if self.features is not None:
            train, test = self._with_features(train, test)
        if self.persons is None:
            return train, test
        from evenhand.data.dataset import by_person_or_capped

        assert train.together is not None
        return by_person_or_capped(train, train.together, self.records_per_person, self.person_cap), test

    def _with_features(self, train: Data, test: Data | None) -> tuple[Data, Data | None]:
        """Return the records with the features of a frozen network as inputs."""
        named = self.features_named
        from evenhand.data.feature_cache import featured
        from evenhand.models.features import extract, provenance

        keep = not self.own_data and not _user_code.is_own(named)
        replaced = partial(featured, name=named, extract=extract, keep=keep, provenance=provenance(named))
        return replaced(train), None if test is None else replaced(test)

    @property
    def features_named(self) -> str:
        """Return the name of the features; raise if it stands for code that nobody named."""
        if self.features is None or self.features == PYTHON:
            raise _unnamed("features")
        return self.features

    def _records(self) -> tuple[Data, Data | None]:
        """Return training and held-out records, without features."""
        from evenhand.data import load, read
        from evenhand.data.owners_and_groups import assigned
        from evenhand.data.record_checks import refuse_both_sides
        from evenhand.data.tables import split

        beside = self.roles[1]
        if not self.own_data:
            if self.keep_together is not None:
                raise UsageError("keep_together names a column of a file of your own; named data have a fixed split.")
            train, test = load(self.data, data_dir=self.data_dir, options=self.source)
            if self.persons is not None and (train.together is None or self.persons != train.together_by):
                told = f"their records are told apart by {train.together_by!r} only" if train.together_by else "nothing"
                raise UsageError(
                    f"The data {self.data!r} do not say which records are of one {self.persons!r} (what they say: "
                    f"{told}), so no promise can be made about that."
                )
            return assigned(train, test, beside)
        if self.source:
            raise UsageError("[source] has options of built-in data; a file of your own has none: delete the table.")
        known = self.declaration()
        data = read(self.data, known, delimiter=self.delimiter)
        if self.test_data is not None:
            held_out = read(self.test_data, known, delimiter=self.delimiter)
            refuse_both_sides(data, held_out)
            return assigned(data, held_out, beside)
        return split(
            assigned(data, None, beside)[0], self.test_share, self.seed if self.split_seed is None else self.split_seed
        )

    def build_model(self, facts: Facts) -> nn.Module:
        """Return a new model of the configured name, initialised from ``seed``, on ``device``."""
        if self.model == PYTHON:
            raise _unnamed("model")
        import torch

        from evenhand.models import build

        with torch.random.fork_rng(devices=[]):
            (torch.default_generator if self.device == "cpu" else torch).manual_seed(self.seed)
            return build(self.model, facts).to(_device(self.device))


def from_toml(path: Path) -> Config:
    """Read a config; an unknown key is an error that names the nearest one. Paths are relative to the file."""
    return absolute(merged(Config(), settings(path)), path.parent)


def settings(path: Path) -> dict[str, Any]:
    """Return the settings in a TOML file, unchecked; in a run folder, without code that nobody named."""
    values = _toml.read(path)
    return _without_code(values) if (path.parent / "plan.json").exists() else values


def _without_code(values: Any, name: str = "", *, remembered: bool = True) -> Any:
    """Return the settings with "python" in place of every file of code, however deeply nested."""
    if isinstance(values, Mapping):
        return {key: _without_code(inner, key, remembered=remembered) for key, inner in values.items()}
    if isinstance(values, list):
        return [_without_code(inner, name, remembered=remembered) for inner in values]
    if name not in trusted_code.ROLES or not isinstance(values, str) or not _user_code.is_own(values):
        return values
    return values if remembered and trusted_code.remembered(values) else PYTHON


def of_run(folder: Path, *, code: Mapping[str, Any] | None = None, remembered: bool = False) -> Config:
    """Return the config kept in a run folder; a run that was attached to a user's own loop has none.

    Run folders are shared, so no file of code is executed because a folder names it: "python" stands in its place.

    Args:
      folder: the run folder.
      code: files of code that the person names, by setting; it is printed if they differ from those that the run used.
      remembered: keep a file of code that the folder names if a person named that very file on this machine before.
    """
    file = folder / "config.toml"
    values = _toml.read(file) if file.exists() else {"data": PYTHON, "model": PYTHON}
    values = _without_code(values, remembered=remembered)
    for name, named in (code or {}).items():
        if isinstance(named, str):
            values[name] = _user_code.absolute(named, Path.cwd()) if _user_code.is_own(named) else named
            if _user_code.is_own(named):
                trusted_code.tell_difference(folder, name, values[name])
    return absolute(merged(Config(), values), folder)


def recorded(folder: Path) -> str | None:
    """Return the text of the config in a run folder, None without one; no file that it names is opened."""
    file = folder / "config.toml"
    return to_toml(merged(Config(), _toml.read(file))) if file.exists() else None


def absolute(config: Config, base: Path) -> Config:
    """Return the config with all paths resolved against ``base``, so that a run can be resumed from any folder."""
    changes: dict[str, Any] = {}
    if config.own_data:
        changes["data"] = os.path.abspath(base / config.data)
    for name in ("test_data", "data_dir"):
        if getattr(config, name) is not None:
            changes[name] = os.path.abspath(base / getattr(config, name))
    changes |= config.roles[1].paths(base)
    for name in trusted_code.ROLES:
        value = getattr(config, name)
        if value not in (None, PYTHON) and _user_code.is_own(value):
            changes[name] = _user_code.absolute(value, base, f"--{name}")
    return dataclasses.replace(config, **changes)


def merged(config: Config, values: Mapping[str, Any]) -> Config:
    """Return ``config`` with ``values`` in place of the settings they name; raise if a type is wrong."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        _validate.known(name, fields, "setting")
        kind = str(fields[name].type)
        if not fits(value, kind):
            raise UsageError(f"The setting {name} takes {words(kind)}, not {type(value).__name__}.")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UsageError(f"The setting {name} takes {words(kind)} of ordinary size, below 2^63.")
        checked[name] = float(value) if "float" in kind and isinstance(value, int) else value
    return dataclasses.replace(config, **checked)


def to_toml(config: Config) -> str:
    """Return the settings as a file for ``evenhand train FILE``. Those that are None or empty are left out."""
    lines = ["# evenhand train FILE takes this file; flags override it"]
    inner: list[str] = []
    for name in _NAMES:
        value = getattr(config, name)
        if isinstance(value, Mapping):
            inner += tables(name, value)
        elif value is not None and (name not in _OWN or value != getattr(Config, name)):
            lines.append(f"{name} = {literal(value)}")
    text = "\n".join([*lines, *inner]) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            "A path of data, model or owners has bytes that are no characters in this locale, so the run could not "
            "find it again: rename the file, or set LC_ALL=C.UTF-8. Nothing was spent."
        ) from None
    return text


_OWN = (
    *("delimiter", "labels", "missing_tokens", "ordered", "test_share", "device"),
    *("optimizer", "lr_schedule", "lean", "precision", "least_records", "prior_counts", "goal"),
)
"""Settings that are written only where they differ from the default."""
_NAMES = tuple(field.name for field in dataclasses.fields(Config))


def _unnamed(role: str) -> UsageError:
    """Return the error for code that a folder names and no person did."""
    return UsageError(
        f"The {role} of this run: code of somebody's own, which is executed only if you name it, since run folders are "
        f"shared and anybody can write one. If you trust the file, name it: --{role} file.py:factory, or {role}= in "
        "Python. A file that changed since it was named counts as another."
    )


def _device(name: str) -> torch.device:
    """Return the device; raise if it cannot be used."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"The device {name!r} is not there: use --device cpu.") from None
    return device


def settings_of(
    descent: Descent,
    loss: str | Loss | None,
    ema: EMA | None,
    compute: Compute,
    augment: str | Augment | None,
    views: int,
) -> dict[str, Any]:
    """Return the settings of a run that its config must name; "python" stands for a Python object.

    Examples:
      >>> from evenhand import Compute
      >>> from evenhand.training.optimizers import Descent
      >>> values = settings_of(Descent("adam", 0.1), "focal", None, Compute(lean=True), lambda inputs: inputs, 4)
      >>> [values[key] for key in ("optimizer", "loss", "lean", "augment", "views")]
      ['adam', 'focal', True, 'python', 4]
    """
    return {
        "loss": _name(loss),
        "optimizer": _name(descent.optimizer),
        "lr": float(descent.lr),
        "momentum": descent.momentum,
        "weight_decay": descent.weight_decay,
        "lr_schedule": _name(descent.scheduler),
        "average": ema.decay if ema is not None and ema.warm_up else None,
        "augment": _name(augment),
        "views": views,
        **dataclasses.asdict(compute),
    }


def descent_again(config: Config, optimizer: OptimizerFactory | None, scheduler: SchedulerFactory | None) -> Descent:
    """Return the descent that the run began with; if the user's own schedule is not passed again, loading fails."""
    from evenhand.training.optimizers import Descent

    if scheduler is None and config.lr_schedule == PYTHON:
        return Descent(optimizer or config.optimizer, config.lr, scheduler="constant")
    if optimizer is not None:
        given = config.lr_schedule if config.optimizer == PYTHON else "constant"
        return Descent(optimizer, config.lr, scheduler=scheduler or given)
    return Descent(config.optimizer, config.lr, config.momentum, config.weight_decay, scheduler or config.lr_schedule)


def views_again(config: Config, augment: str | Augment | None, views: int) -> Views | None:
    """Return the views that the run began with; if the user's own function is not passed again, loading fails."""
    from evenhand.training.augment import views_of

    if augment is not None or config.augment is None:
        return views_of(augment, views)
    return None if config.augment == PYTHON else views_of(config.augment, config.views)


def _name(given: object) -> str | None:
    """Return a name as it is, and "python" for an object."""
    return given if given is None or isinstance(given, str) else PYTHON

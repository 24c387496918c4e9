"""What a training run was asked for: one dataclass, one TOML file, one set of flags, key for key the same."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import _validate
from evenhand.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from evenhand.data import Data
    from evenhand.types import Facts


PYTHON = "python"
"""Stands for data or a model that was passed to ``fit`` as a Python object and cannot be found again by name."""


@dataclass(frozen=True)
class Config:
    """Settings of ``evenhand train``.

    Examples:
      >>> Config(epsilon=3.0).method
      'dpsgd'
    """

    data: str = "digits"
    model: str = "mlp"
    method: str = "dpsgd"
    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None
    epochs: float = 30.0
    batch_size: float | None = None
    lr: float = 0.2
    seed: int = 0
    insecure_seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.number(self.epochs, "epochs", low=0)
        _validate.number(self.lr, "lr", low=0)
        _validate.whole(self.seed, "seed", low=0)

    def load_data(self) -> tuple[Data, Data | None]:
        """Training and held-out data of the named source."""
        if self.data == PYTHON:
            raise UsageError(
                "This run was started from Python with its own data: pass train= (and model=) to resume it."
            )
        from evenhand.data import load

        return load(self.data)

    def build_model(self, facts: Facts) -> nn.Module:
        """The named model, initialised from ``seed``."""
        if self.model == PYTHON:
            raise UsageError("This run was started from Python with its own model: pass model= to resume or load it.")
        import torch

        from evenhand.models import build

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return build(self.model, facts)


def from_toml(path: Path) -> Config:
    """Read a config; an unknown key is an error that names the nearest one."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None
    return merged(Config(), values)


def of_run(folder: Path) -> Config:
    """The config kept in a run folder; a run that was attached to a user's own loop has none."""
    file = folder / "config.toml"
    return from_toml(file) if file.exists() else Config(data=PYTHON, model=PYTHON)


def merged(config: Config, values: Mapping[str, Any]) -> Config:
    """``config`` with ``values`` in place of what they name; types are checked, numbers may be whole."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    checked: dict[str, Any] = {}
    for key, value in values.items():
        _validate.known(key, fields, "setting")
        kind = str(fields[key].type)
        if not _fits(value, kind):
            raise UsageError(f"The setting {key} takes {_words(kind)}, not {type(value).__name__}.")
        checked[key] = float(value) if "float" in kind and isinstance(value, int) else value
    return dataclasses.replace(config, **checked)


def to_toml(config: Config) -> str:
    """The same settings as a file that ``evenhand train FILE`` takes. What is None is left out."""
    lines = ["# evenhand train FILE takes this file; flags override it"]
    tables = []
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, Mapping):
            tables += (
                [f"\n[{name}]", *(f"{key} = {json.dumps(entry)}" for key, entry in value.items())] if value else []
            )
        elif value is not None:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return False
    wanted = {"str": str, "float": (int, float), "int": int, "Mapping": Mapping}
    return any(isinstance(value, types) for name, types in wanted.items() if name in kind)  # type: ignore[arg-type]


def _words(kind: str) -> str:
    for name, words in (("Mapping", "a table"), ("str", "text"), ("float", "a number"), ("int", "a whole number")):
        if name in kind:
            return words
    return kind

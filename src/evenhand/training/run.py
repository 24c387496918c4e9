"""Read a Run from its folder: model, statement, metrics, report and predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evenhand import _notebook, untrusted
from evenhand._numbers import promised, rounded_up, setting
from evenhand.accounting import owner_classes
from evenhand.density import METHODS
from evenhand.errors import UsageError, VerificationError
from evenhand.reporting import group_metrics, metrics, model_card, run_findings, run_page
from evenhand.reporting.audits.section import section as audit_section
from evenhand.reporting.held_out import effective_records, small_cells
from evenhand.runs import released_weights
from evenhand.runs import statement as statements
from evenhand.runs.folder import Folder, write_durably
from evenhand.terminal import say
from evenhand.training.config import PYTHON, of_run
from evenhand.training.goals.decision_sections import changes_section, frontier_section

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from evenhand.data.dataset import Data
    from evenhand.mechanism.make_plan import Plan
    from evenhand.methods.priors import Prior
    from evenhand.training.evaluate import Predictions
    from evenhand.training.goals.decision import Decision


@dataclass(frozen=True)
class Report:
    """A finished page. With figures that must not be shared it can be saved in the private folder ``within`` only."""

    page: str
    within: Path | None = None

    def save(self, path: str | Path) -> Path:
        """Write the page and return its path."""
        if self.within is not None and not Path(path).resolve().is_relative_to(self.within.resolve()):
            raise UsageError(
                "This page has figures that must not be shared, of training records or of small groups: save it in "
                f"{self.within}, for example as report-full.html there."
            )
        write_durably(Path(path), self.page.encode())
        return Path(path)

    def _repr_html_(self) -> str:
        return _notebook.frame(self.page)


@dataclass(frozen=True)
class Statement:
    """The privacy statement; printing it gives the words, ``data`` the JSON form."""

    data: Mapping[str, Any]

    @property
    def epsilon(self) -> float | None:
        """Return the largest epsilon over the owners; None if none is established."""
        value = self.data["guarantee"]["epsilon"]
        return None if value is None else float(value)

    def __str__(self) -> str:
        return "\n\n".join(statements.paragraphs(self.data))

    def _repr_html_(self) -> str:
        unit = statements.promised_to(self.data["public_inputs"])
        head = {f"Epsilon (per {unit}, add/remove)": _epsilon(self.epsilon), "Delta": self.data["guarantee"]["delta"]}
        return _notebook.facts("Privacy", head, [*self.data["warnings"], *statements.paragraphs(self.data)])


@dataclass(frozen=True)
class Run:
    """A run folder, with the model when it was asked for."""

    folder: Folder
    trained: nn.Module | None = None

    @property
    def path(self) -> Path:
        """Return the run folder."""
        return self.folder.path

    @property
    def plan(self) -> Plan:
        """Return the plan that the run followed."""
        return self.folder.plan()

    @property
    def model(self) -> nn.Module:
        """Return the trained model."""
        if self.trained is None:
            raise UsageError(
                "The architecture of this model is code of somebody's own, which is executed only if you name it: pass "
                "it, load(path, model=MyModel()), or on the command line --model file.py:factory."
            )
        return self.trained

    @property
    def privacy(self) -> Statement:
        """Return the privacy statement, recomputed from the ledger."""
        return Statement(self.folder.statement())

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations on held-out data during training, without figures of groups too small to be shared."""
        return self.folder.metrics()

    @property
    def metrics(self) -> pandas.DataFrame:
        """Return a DataFrame with a row per evaluation and a column per metric and group; an undefined value is NaN.

        Columns are named as by fairlearn: every name of ``reporting.metrics.METRICS`` that the targets have,
        ``fpr_{difference,ratio,group_min,group_max,std}`` and so on, ``demographic_parity_difference``, and per group
        ``fpr[<group>]``. Rates per group have 95 % intervals (``fpr_low[<group>]``, ``fpr_high[<group>]``), and so has
        the gap between groups (``fpr_difference_low``, ``fpr_difference_high``, over all pairs together). They hold the
        chance of the held-out records, not that of another training. Small groups are among them where the run has its
        ``private`` folder: share ``evaluations``, or the run's files, which leave them out.
        """
        import pandas

        rows = [_flat(row) for row in self.folder.metrics(full=True)]
        return pandas.DataFrame(rows, columns=list(dict.fromkeys(key for row in rows for key in row)) or ["step"])

    @property
    def prior(self) -> Prior | None:
        """Return the shares of the labels, from the noisy counts that the run released; None if it released none."""
        return self.folder.prior()

    @property
    def group_column(self) -> str | None:
        """Return the column whose values are the groups, where the data declared one."""
        return self.folder.group_column()

    @property
    def decision(self) -> Decision | None:
        """Return how outputs become answers; None if the largest output is the answer."""
        from evenhand.training.goals.decision import read

        return read(self.path)

    def predict(self, inputs: Any, *, groups: Sequence[str] | None = None) -> Predictions:
        """Return the answers of model and decision for new records.

        Args:
          inputs: a DataFrame with the columns of the training data, where those were declared; else inputs as the
            model takes them, an array or a tensor.
          groups: the group of each record, where the run's decision depends on it and no column says it.
        """
        from evenhand.data.frames import is_frame
        from evenhand.training.goals.predict import predict

        if is_frame(inputs) and (self.path / "preprocessing.json").exists():
            return predict(self.path, inputs, model=self.model, groups=groups)
        from evenhand.training.evaluate import predict_arrays

        return predict_arrays(self.model, inputs, self.plan.facts.labels, self.decision, groups)

    def _repr_html_(self) -> str:
        statement, last = self.privacy, self.folder.last_evaluation()
        values = {
            "Run": self.path,
            "Method": self.plan.method,
            f"Spent epsilon (per {self.plan.facts.promised}, add/remove)": _epsilon(statement.epsilon),
            "Delta": self.plan.delta,
        }
        names = [name for name in ("accuracy", *run_findings.FURTHER) if last.get(name) is not None]
        metrics = {name: f"{last[name]:.4g}" for name in names}
        rows = [
            [name, f"{share:.1%}", last["group_records"].get(name, 0)] for name, share in last.get("groups", {}).items()
        ]
        groups = _notebook.table("Groups", ("group", "accuracy", "held-out records"), rows) if rows else ""
        return _notebook.facts("Run", {**values, **metrics}) + groups

    def card(self) -> str:
        """Return the model card as Markdown: the model, its accuracy per group, and the promise."""
        statement, last = self.folder.statement(), self.folder.last_evaluation()
        frame, plan = run_findings.recorded(last), self.plan
        return model_card.card(
            model_card.CardData(
                title=f"{plan.method}, {plan.facts.records} training {plan.facts.units}",
                facts=_facts(plan, statement),
                statement=statements.paragraphs(statement),
                warnings=statement["warnings"],
                overall=frame.overall,
                groups=frame.by_group,
                metrics=run_findings.further(last),
                labels=plan.facts.labels,
                not_covered=statement["does_not_cover"],
                software=statement["software"],
            )
        )

    def report(
        self,
        test: Any = None,
        *,
        groups: Iterable[Any] | None = None,
        training_records: bool = False,
        full: bool = False,
        least_records: int = small_cells.LEAST,
    ) -> Report:
        """Return a page on accuracy per group, from the recorded evaluations, or measured anew on ``test``.

        ``test`` is compared with digests of the training records in the run's ``private`` folder, and refused if it
        contains such records. With ``training_records`` nothing is compared, and the page can be saved in ``private``
        only. So can a page with ``full`` figures: else those of groups with fewer than ``least_records`` records in
        ``test`` are left out, and of recorded evaluations those that the run was told to leave out.
        """
        recorded = self.folder.metrics(training_records=training_records, full=full)
        last = self.folder.last_evaluation(training_records=training_records, full=full)
        within = self.folder.private if training_records or full else None
        if test is None:
            frame = run_findings.recorded(last)
        else:
            from evenhand.data.dataset import wrap
            from evenhand.training.evaluate import evaluate

            data = (wrap(test, groups=groups) if groups is not None else wrap(test)).by_record
            if not training_records:
                self.refuse_training_records(data)
            frame = evaluate(self.model, data, self.decision)
            if within is None:
                frame = group_metrics.GroupFrame(frame.overall, small_cells.by_size(frame.by_group, least_records))
        return Report(run_page.render(_report(self.folder, recorded, last, frame, research=within is not None)), within)

    def refuse_training_records(self, data: Data) -> None:
        """Raise if ``data`` contain training records; if their digests are gone, print that nothing was compared."""
        from evenhand.data.fingerprint import Survey
        from evenhand.data.record_checks import refuse_training_records

        if self.folder.rows_file.exists():
            refuse_training_records(Survey.read(self.folder.rows_file), data)
        else:
            say(
                "evenhand: this run folder has no digests of its training records (private/rows.npz), so nobody looked "
                "whether these data hold some. Metrics on training records are not private: do not share them."
            )


def _report(
    folder: Folder,
    metrics: list[dict[str, Any]],
    last: Mapping[str, Any],
    frame: group_metrics.GroupFrame,
    *,
    research: bool = False,
) -> run_page.ReportData:
    plan, statement = folder.plan(), folder.statement()
    counted, owners = statement["mechanism"]["steps_counted"], statement["owners"]
    shown = owner_classes.chosen_few([row["epsilon"] for row in owners])
    column = folder.group_column()
    frame = group_metrics.GroupFrame(frame.overall, run_findings.with_column(frame.by_group, column))
    metrics = [run_findings.row_with_column(row, column) for row in metrics]
    by_metric, sides = (
        {name: run_findings.with_column(of, column) for name, of in last.get(key, {}).items()}
        for key in ("group_metrics", effective_records.BY_SIDE)
    )
    return run_page.ReportData(
        title=f"{plan.method} on {plan.facts.records} {plan.facts.units}",
        headline=run_page.opening(last, frame),
        overall=frame.overall,
        groups=frame.by_group,
        curves=metrics,
        spending={
            owners[index]["name"]: [(step, epsilon) for step, epsilon in plan.spending(index) if step <= counted]
            for index in shown
        },
        budgets={owners[index]["name"]: owners[index]["budget"] for index in shown},
        classes=[_class(row) for row in owners] if 1 < len(owners) <= owner_classes.LISTED else (),
        summary=owner_classes.in_words(owner_classes.summary(owners)) if len(owners) > owner_classes.LISTED else (),
        statement=statements.paragraphs(statement),
        warnings=statement["warnings"],
        facts=_facts(plan, statement),
        reproduce=_reproduce(folder),
        owners=run_findings.owners(last),
        delta=plan.delta,
        research=research,
        unit=plan.facts.promised,
        counted=plan.facts.unit,
        majority=last.get("majority"),
        metrics=by_metric,
        sides=sides,
        together=last.get("metrics", {}),
        audit=audit_section(statement["audit"], f"per {plan.facts.promised}, add/remove, delta {plan.delta:g}"),
        further=[part for part in [changes_section(last), frontier_section(metrics)] if part is not None],
    )


_WHICH = ("segment", "weights", small_cells.FEWEST_OF_CLASS)
"""Keys of an evaluation that are no metrics: which weights were measured, and how many records a class has."""


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one evaluation as a flat dict, with differences between groups added.

    Examples:
      >>> _flat({"step": 1, "accuracy": 0.75, "groups": {"a": 1.0, "b": 0.5}})["accuracy[b]"]
      0.5
    """
    flat: dict[str, Any] = {
        key: value for key, value in row.items() if not isinstance(value, Mapping) and key not in _WHICH
    }
    flat |= row.get("metrics", {})
    parts = {"accuracy": row.get("groups", {}), "log_loss": row.get("group_log_loss", {})}
    parts = {name: part for name, part in parts.items() if part} | row.get("group_metrics", {})
    for name, part in parts.items():
        flat |= metrics.differences(name, part.values())
        flat |= {f"{name}[{group}]": value for group, value in part.items()}
    flat |= metrics.disparities(parts)
    flat |= run_findings.columns(row)
    for key, name in (
        ("group_records", "records"),
        ("owners", "owner_accuracy"),
        ("owner_records", "owner_records"),
    ):
        flat |= {f"{name}[{group}]": value for group, value in row.get(key, {}).items()}
    return flat


def _epsilon(value: float | None) -> str:
    return "none" if value is None else rounded_up(value)


def _class(row: Mapping[str, Any]) -> run_page.OwnerClass:
    """Return an owner class in the words of the page."""
    return run_page.OwnerClass(
        name=row["name"],
        records=row["records"],
        promised=promised(row["budget"]),
        spent=_epsilon(row["epsilon"]),
        rate=f"{row['rate']:.4g}",
        bound=owner_classes.span(row["bound"]),
        noise=owner_classes.span(row["noise_multiplier"]),
    )


def _facts(plan: Plan, statement: Mapping[str, Any]) -> dict[str, str]:
    levels, charged = plan.levels, statement["mechanism"]["steps_charged"]
    noise, bound = (
        setting(*pair) for pair in ((levels[0].noise, levels[-1].noise), (levels[0].bound, levels[-1].bound))
    )
    return {
        "Method": f"{plan.method} ({plan.guarantee})",
        plan.facts.units.capitalize(): f"{plan.facts.records} in {len(plan.facts.owners)} owner class(es)",
        "Steps": f"{charged} charged of {plan.steps} planned, about {plan.expected_batch:g} {plan.facts.units} each",
        "Noise multiplier": noise if plan.certified else "none",
        "Clip bound": bound if plan.certified else "none",
        "Plan": plan.digest[:16],
        "Ledger head": statement["ledger_head"][:16],
        released_weights.FACT: (statement["model_sha256"] or "not released")[: released_weights.SHOWN],
        "Software": f"evenhand {statement['software']['evenhand']}, torch {statement['software']['torch']}",
    }


def _reproduce(folder: Folder) -> str:
    return (
        "evenhand verify .      # in this run folder: checks plan, noise, spent epsilon, statement, metrics and model\n"
        + ("evenhand train config.toml --out again" if (folder.path / "config.toml").exists() else "")
    )


def load(path: str | Path, *, model: nn.Module | str | None = None) -> Run:
    """Read a run folder and return the run. Weights come from safetensors only: loading them never executes code.

    Args:
      path: the run folder.
      model: the architecture (a module, or ``file.py:factory``), unless it is a built-in one, which is found by its
        name in the folder. No file of code is executed because a folder names it, since folders are shared.

    Examples:
      >>> import tempfile, torch, evenhand as eh
      >>> train, test = eh.data.digits()
      >>> run = eh.fit(torch.nn.Linear(64, 10), train, epsilon=3.0, epochs=1, out=tempfile.mkdtemp())
      >>> loaded = eh.load(run.path, model=torch.nn.Linear(64, 10))
      >>> bool((loaded.model.weight == run.model.weight).all())
      True
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    folder = Folder.existing(path)
    if not folder.model_file.exists():
        raise UsageError(
            f"{path} has no model yet: the run was not finished. Continue it with `evenhand resume {path}`, in Python "
            f"with eh.resume({str(path)!r}, model=..., train=...), a loop of your own with eh.attach(..., resume=...)."
        )
    if not folder.model_file.is_file():  # reading a pipe would never end
        raise UsageError(f"{folder.model_file} is not a file: it was not loaded.")
    if model is None and folder.plan().method in METHODS:
        model = _density(folder)
    if model is None or isinstance(model, str):
        config = of_run(folder.path, code={"model": model})
        if config.model == PYTHON:
            return Run(folder)
        model = config.build_model(folder.plan().facts)
    try:
        with untrusted.opened(folder.model_file, largest=None):
            load_model(model, str(folder.model_file))
    except (SafetensorError, VerificationError):
        raise UsageError(f"{folder.model_file} is damaged: it was not loaded.") from None
    except RuntimeError:
        raise UsageError(
            "The model passed does not have the parameters of the saved one: pass the same architecture."
        ) from None
    return Run(folder, model)


def _density(folder: Folder) -> nn.Module:
    """Return the density in a run folder; its released tensors say how it is built."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from evenhand.density.torch_models import rebuilt

    try:
        with untrusted.opened(folder.model_file, largest=None):
            return rebuilt(load_file(str(folder.model_file)))
    except (SafetensorError, VerificationError):
        raise UsageError(f"{folder.model_file} is damaged: it was not loaded.") from None

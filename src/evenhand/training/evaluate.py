"""Measure a model on held-out records, overall and per group. The statement does not protect these records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from evenhand.data.dataset import Data
from evenhand.data.record_seeds import begun
from evenhand.errors import UsageError
from evenhand.gradients.batch_utils import as_plain, batch_size, call, logits, take
from evenhand.model_io import on_device
from evenhand.reporting.group_metrics import GroupFrame, Measures, estimate, measure_outcomes, natural
from evenhand.reporting.held_out import effective_records
from evenhand.reporting.held_out.small_cells import FEWEST_OF_CLASS, fewest_of_class
from evenhand.reporting.metrics import CLASSES, LABELS, NUMBERS, ORDINAL, TOKENS
from evenhand.reporting.outcomes import Outcomes, by_group, values
from evenhand.training.losses import Binary, Loss, by_word
from evenhand.types import Facts

if TYPE_CHECKING:
    from evenhand.data import Declaration
    from evenhand.training.goals.serve import Answering

CHUNK = 1024
_DRAWS = 0
"""Seed of a randomised decision while it is measured, so that figures can be computed again."""
OWNERS = 1000
"""Up to so many owner classes are evaluated one by one; of more hardly any has enough held-out records to tell."""


def kind_of(facts: Facts, targets: Tensor) -> str:
    """Return the kind of these targets: classes, ordinal, labels (several), numbers or tokens.

    Examples:
      >>> kind_of(Facts(2, (("all", 2),), labels=("a", "b")), torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
      'labels'
      >>> kind_of(Facts(2, (("all", 2),)), torch.tensor([0.5, 1.0]))
      'numbers'
    """
    if targets.is_floating_point():
        return LABELS if facts.labels and targets.dim() == 2 else NUMBERS
    if targets.dim() > 1:
        return TOKENS
    return ORDINAL if facts.ordered else CLASSES


def predict(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return predicted and true class of every row, in order. The model's mode is put back afterwards."""
    scores, true = compute_scores(model, data)
    return scores.argmax(-1), true


def compute_scores(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Return the model's outputs and the targets of every row, in order. Its mode is put back afterwards.

    Of classes there is one output each: where the model has a single one, it is taken as the logit of the second.
    """
    scores, true = (torch.cat(column) for column in zip(*_passes(model, data), strict=True))
    return scores, true


def _passes(model: nn.Module, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets of all rows, some at a time."""
    data = data.by_record.on(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            chunks = torch.split(torch.arange(len(data)), CHUNK)
            reading = begun(data.fetch, chunks[0])
            for later in (*chunks[1:], None):
                inputs, targets = reading()
                if later is not None:
                    reading = begun(data.fetch, later)
                scores, targets = outputs(model, inputs).cpu(), targets.cpu()
                yield scores_of(scores, kind_of(data.facts, targets), model), targets
    finally:
        model.train(was_training)


def scores_of(scores: Tensor, kind: str, model: nn.Module) -> Tensor:
    """Return outputs in the form that the metrics of a kind of targets need.

    A single output for two classes is the logit of the second. A density gives one score per class, each compared with
    the rest where a record may have several labels.

    Examples:
      >>> scores_of(torch.tensor([[2.0]]), "classes", nn.Linear(1, 1))
      tensor([[0., 2.]])
    """
    if kind in (CLASSES, ORDINAL) and (scores.dim() == 1 or scores.shape[-1] == 1):
        logit = scores.reshape(-1)
        return torch.stack([torch.zeros_like(logit), logit], dim=1)
    if kind == LABELS and getattr(model, "log_densities", False) and scores.shape[1] > 1:
        return _against_rest(scores)
    return scores


def shares_right(scores: Tensor, targets: Tensor, kind: str, model: nn.Module) -> Tensor:
    """Return the share of each record that is answered correctly, from the model's outputs; NaN for real numbers.

    Examples:
      >>> scores = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
      >>> shares_right(scores, torch.tensor([1, 0]), "classes", nn.Linear(1, 1)).tolist()
      [1.0, 0.0]
    """
    if kind == NUMBERS:
        return torch.full((len(targets),), math.nan, dtype=torch.float64)
    if kind == LABELS:
        return ((scores_of(scores, kind, model) > 0) == (targets > 0)).all(1).double()
    right = (_by_place(scores, targets, kind, model).argmax(-1) == targets).double()
    return right if right.dim() == 1 else right.flatten(1).mean(1)


def _by_place(scores: Tensor, targets: Tensor, kind: str, model: nn.Module) -> Tensor:
    """Return outputs with the classes last, in the order that losses read."""
    return by_word(scores, targets).movedim(1, -1) if kind == TOKENS else scores_of(scores, kind, model)


def _against_rest(scores: Tensor) -> Tensor:
    """Return the log odds of each class against all others together, from their log densities."""
    columns = [
        scores[:, place] - torch.cat([scores[:, :place], scores[:, place + 1 :]], dim=1).logsumexp(1)
        for place in range(scores.shape[1])
    ]
    return torch.stack(columns, dim=1) + math.log(scores.shape[1] - 1)


def measure_model(model: nn.Module, data: Data, decision: Answering | None = None) -> Outcomes:
    """Return what the model says of every held-out record, for the metrics of its kind of targets.

    A ``decision`` moves the outputs before they are answers, see ``goals.decision``.

    Examples:
      >>> import evenhand as eh
      >>> outcomes = measure_model(torch.nn.Linear(64, 10), eh.data.digits()[1])
      >>> outcomes.kind, outcomes.probabilities.shape
      ('classes', (450, 10))
    """
    kind = kind_of(data.facts, data.fetch(torch.arange(1))[1])
    if kind == TOKENS:
        return _tokens(model, data)
    scores, true = compute_scores(model, data)
    scores = scores.double()
    if decision is not None:
        scores = decision.adjust(
            _shaped(scores, true) if kind == LABELS else scores,
            *(kind, data.group_names(), torch.Generator().manual_seed(_DRAWS)),
        )
    if kind == NUMBERS:
        truth, guess = true.double().numpy(), _shaped(scores, true).numpy()
        bounds = None if data.declared is None else data.declared.target
        if bounds is not None:
            truth, guess = bounds.decode(truth), bounds.decode(guess)
        return Outcomes(kind, truth, guess)
    if kind == LABELS:
        losses = functional.binary_cross_entropy_with_logits(_shaped(scores, true), true.double(), reduction="none")
        each = _shaped(scores, true).sigmoid().numpy()
        guess = (each > 0.5).astype(float)
        names = data.facts.labels
        return Outcomes(kind, true.double().numpy(), guess, each, losses.mean(1).numpy(), labels=names)
    if scores.dim() != 2:
        raise UsageError("The report needs one output per class, or a single one for two classes.")
    losses = functional.nll_loss(scores.log_softmax(-1), true, reduction="none")
    likely = scores.softmax(-1).numpy()
    return Outcomes(kind, true.numpy(), scores.argmax(-1).numpy(), likely, losses.numpy(), classes=scores.shape[1])


def check_outputs(model: nn.Module, held_out: Data, loss: Loss, counted: Sequence[str]) -> None:
    """Raise unless the model's outputs can be measured: one per class, label or number, or one for two classes.

    ``counted`` are the labels of which the run releases counts, none if it releases nothing.
    """
    first = held_out.take(torch.arange(1))
    outcomes = measure_model(model, first)
    labels = len(held_out.facts.labels)
    if outcomes.kind in (CLASSES, ORDINAL) and labels and outcomes.classes < labels:
        raise UsageError(
            f"The report needs one output per class, and this model has fewer than {labels}: give it {labels}, or a "
            "single one where there are two classes."
        )
    if outcomes.kind in (CLASSES, ORDINAL) and counted and outcomes.classes > len(counted):
        raise UsageError(
            f"The model has {outcomes.classes} outputs and the training data {len(counted)} classes: give it "
            f"{len(counted)}, or declare all classes, wrap(..., labels=[...]), or leave counts out, prior=False. "
            "Nothing was spent."
        )
    if outcomes.kind == NUMBERS and isinstance(loss, Binary):
        raise UsageError(
            "The loss is binary, and the targets are real numbers, so they would be measured as such: pass whole "
            "numbers or names as targets (one column), or labels= with a column of 0 and 1 for each."
        )


def _shaped(scores: Tensor, true: Tensor) -> Tensor:
    """Return outputs in the shape of the targets; raise if there are more or fewer."""
    if scores.numel() != true.numel():
        raise UsageError(
            f"The model gives outputs of shape {tuple(scores.shape[1:])} a record, and its targets have shape "
            f"{tuple(true.shape[1:])}: give one output per target."
        )
    return scores.reshape(true.shape)


def _tokens(model: nn.Module, data: Data) -> Outcomes:
    """Return losses and right answers per record of a language model, whose outputs are as ``losses.by_word`` reads.

    Places whose target is negative (padding) do not count.
    """
    parts: list[tuple[Tensor, ...]] = []
    for outputs_given, targets in _passes(model, data):
        scores = _by_place(outputs_given, targets, TOKENS, model)
        if scores.shape[:-1] != targets.shape:
            raise UsageError(
                f"The targets are tokens of shape {tuple(targets.shape[1:])} a record, and the model gives outputs of "
                f"shape {tuple(outputs_given.shape[1:])}: give one score per place and word, (record, place, word)."
            )
        counted = targets >= 0
        likely = scores.double().log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        hits = (scores.argmax(-1) == targets) & counted
        parts.append(tuple(part.flatten(1).sum(1) for part in (-likely * counted, hits.double(), counted.double())))
    losses, right, counts = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    return Outcomes(TOKENS, np.empty(0), right, losses=losses, tokens=counts)


def outputs(model: nn.Module, inputs: Any) -> Tensor:
    """Return the logits of a model for a tensor, a tuple of arguments or a Mapping of keyword arguments."""
    return logits(call(model, inputs))


def evaluate(model: nn.Module, data: Data, decision: Answering | None = None) -> GroupFrame:
    """Return accuracy overall and per group with 95 % intervals; not measured where targets are real numbers.

    Where it is known that several records are of one person, intervals take them for fewer (``effective_records``).
    """
    outcomes = measure_model(model, data, decision)
    if outcomes.kind == NUMBERS:
        nothing = estimate(math.nan, 0)
        return GroupFrame(nothing, dict.fromkeys(dict.fromkeys(data.group_names()), nothing))
    shares, counts = _means(data.group, torch.from_numpy(outcomes.right), data.facts.groups)
    told = _effective(data)
    independent = effective_records.sizes(told)
    return GroupFrame(
        estimate(float(outcomes.right.mean()), len(data), told.get(effective_records.ALL)),
        {name: estimate(shares[name], counts[name], independent.get(name)) for name in sorted(shares, key=natural)},
    )


def _effective(data: Data) -> dict[str, Any]:
    """Return how many independent records these count as, by group and owner; nothing if all of them do."""
    whose, owners = data.by_record.together, data.facts.owner_names
    return effective_records.figures(
        None if whose is None else whose.cpu().numpy(),
        (data.group.cpu().numpy(), data.facts.groups),
        (data.owner.cpu().numpy(), owners if 1 < len(owners) <= OWNERS else ()),
    )


def measures(model: nn.Module, data: Data) -> Measures:
    """Return every metric on held-out data, overall, per group and per owner. Outputs are taken as logits.

    Examples:
      >>> import torch, evenhand as eh
      >>> metrics = measures(torch.nn.Linear(64, 10), eh.data.digits()[1])
      >>> sorted(metrics.by_group["accuracy"])[8], 0 <= metrics.across["accuracy_difference"] <= 1
      ('class 8', True)
    """
    names = data.facts.owner_names
    owners = [names[index] for index in data.owner.tolist()] if 1 < len(names) <= OWNERS else None
    return measure_outcomes(measure_model(model, data), groups=data.group_names(), owners=owners)


def row(model: nn.Module, data: Data, step: int, epoch: float, decision: Answering | None = None) -> dict[str, Any]:
    """Return one line of metrics.jsonl: all metrics of ``measures`` but those across groups, for every evaluation.

    ``targets`` names the kind of targets where they are not classes. An undefined value is None, since plain JSON has
    no NaN: accuracy too, where targets are real numbers.
    """
    outcomes, facts = measure_model(model, data, decision), data.facts
    overall = values(outcomes)
    groups = by_group(outcomes, data.group.numpy(), facts.groups)
    right = torch.from_numpy(outcomes.right)
    shares, records = _means(data.group, right, facts.groups)
    line: dict[str, Any] = {
        "step": step,
        "epoch": round(epoch, 4),
        "accuracy": _finite(float(right.mean())),
        "records": len(data),
        "majority": _finite(outcomes.majority),
        **{name: _finite(overall[name]) for name in _PLAIN if name in overall},
        "groups": _plain(shares),
        "group_records": records,
        **_effective(data),
    }
    if "log_loss" in groups:
        line["group_log_loss"] = _plain(groups["log_loss"])
    if 1 < len(facts.owners) <= OWNERS:
        owned, line["owner_records"] = _means(data.owner, right, facts.owner_names)
        line["owners"] = _plain(owned)
    line |= _sides(outcomes, data) if effective_records.ALL in line else {}
    line |= {"metrics": _plain(overall), "group_metrics": {name: _plain(part) for name, part in groups.items()}}
    if outcomes.kind in (CLASSES, ORDINAL) and len(outcomes):
        whose = None if data.by_record.together is None else data.by_record.together.cpu().numpy()
        line[FEWEST_OF_CLASS] = fewest_of_class(outcomes.truth, data.group.cpu().numpy(), facts.groups, whose)
    return line if outcomes.kind == CLASSES else {**line, "targets": outcomes.kind}


def _sides(outcomes: Outcomes, data: Data) -> dict[str, Any]:
    """Return the independent records of either class, or with and without each label, by group; of others nothing."""
    whose = data.by_record.together
    assert whose is not None
    code, groups = data.group.cpu().numpy(), data.facts.groups
    return effective_records.by_side(whose.cpu().numpy(), code, groups, outcomes.sides)


_PLAIN = ("balanced_accuracy", "mcc", "roc_auc", "log_loss", "rank_mae")
"""Metrics that also stand in the line itself, as in earlier versions."""


def _plain(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(number) for name, number in numbers.items()}


def _means(code: Tensor, values: Tensor, names: tuple[str, ...]) -> tuple[dict[str, float], dict[str, int]]:
    """Return mean and number of records by name, for the names that occur."""
    counts = torch.bincount(code, minlength=len(names)).tolist()
    sums = torch.bincount(code, weights=values, minlength=len(names)).tolist()
    present = [index for index in range(len(names)) if counts[index]]
    return (
        {names[index]: sums[index] / counts[index] for index in present},
        {names[index]: counts[index] for index in present},
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Predictions:
    """One row per new record, in order: the most likely label, and the probability of every label."""

    labels: tuple[str, ...]
    predicted: list[str]
    probabilities: list[list[float]]


def predict_arrays(
    model: nn.Module,
    inputs: Any,
    labels: Sequence[str],
    decision: Answering | None = None,
    groups: Sequence[str] | None = None,
) -> Predictions:
    """Return the predictions of a model for inputs as it takes them; outputs are called 0, 1, ... without labels."""
    first, was_training = next(model.parameters()), model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = [outputs(model, on_device(part, first.device)).double().cpu() for part in _parts(inputs)]
    except RuntimeError as error:
        raise UsageError(
            f"The model cannot take inputs {_described(inputs)} ({type(error).__name__}): pass the columns that it was "
            "trained on, in their order."
        ) from None
    finally:
        model.train(was_training)
    scores = torch.cat(parts)
    if decision is not None:
        scores = decision.adjust(scores_of(scores, CLASSES, model), CLASSES, groups)
    scores = scores.softmax(-1)
    names = tuple(labels) or tuple(str(place) for place in range(scores.shape[-1]))
    if scores.ndim != 2 or scores.shape[1] != len(names):
        raise UsageError("The model does not give one output per label: use run.model and your own threshold.")
    return Predictions(names, [names[place] for place in scores.argmax(1).tolist()], scores.tolist())


def _parts(inputs: Any) -> Iterator[Any]:
    """Yield inputs as the model takes them, some records at a time: a tensor, a tuple, a Mapping, data or an array."""
    if isinstance(inputs, Data):
        yield from (inputs.fetch(rows)[0] for rows in torch.split(torch.arange(len(inputs)), CHUNK))
        return
    if not isinstance(inputs, Tensor | tuple | Mapping):
        inputs = torch.from_numpy(np.ascontiguousarray(_numeric(inputs)))
    records = as_plain(inputs)
    size = batch_size(records, None)
    yield from (take(records, slice(start, start + CHUNK)) for start in range(0, max(size, 1), CHUNK))


def _described(inputs: Any) -> str:
    """Return the shape of a record's inputs in words."""
    shape = getattr(inputs, "shape", None)
    return "of these records" if shape is None else f"of shape {tuple(shape[1:])} a record"


def _numeric(inputs: Any) -> Any:
    """Return inputs as an array of numbers; whole numbers become floats, which linear layers take."""
    array = np.asarray(inputs)
    if array.dtype.kind not in "fiub" or array.ndim < 2:
        raise UsageError("Pass one row of numbers per record: a rectangular array, or the columns that were declared.")
    return array.astype(np.float32) if array.dtype.kind in "fb" else array


def name_scores(
    outputs: Tensor,
    declared: Declaration,
    model: nn.Module,
    decision: Answering | None = None,
    groups: Sequence[str] | None = None,
) -> Predictions:
    """Return the predictions that a model's outputs stand for, in the words of the declared target.

    Raises:
      UsageError: the model has another number of outputs than there are labels.
    """
    kind = NUMBERS if declared.target is not None else LABELS if declared.several else CLASSES
    scores = scores_of(outputs, kind, model)
    if declared.target is not None:
        numbers = declared.target.decode(scores.reshape(len(outputs)).numpy())
        return Predictions((), [f"{number:.6g}" for number in numbers], [[] for _ in numbers])
    names = tuple(declared.several or declared.labels)
    if scores.ndim != 2 or scores.shape[1] != len(names):
        raise UsageError("The model does not give one output per label: pass the architecture that was trained.")
    if decision is not None:
        scores = decision.adjust(scores, kind, groups)
    if declared.several:
        likely = scores.sigmoid().tolist()
        chosen = ["; ".join(name for name, share in zip(names, row, strict=True) if share > 0.5) for row in likely]
        return Predictions(names, chosen, likely)
    shares = scores.softmax(-1)
    return Predictions(names, [names[place] for place in shares.argmax(1).tolist()], shares.tolist())

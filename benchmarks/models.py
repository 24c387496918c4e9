"""Real models through the engine: accepted or refused, exact or not, by which way, and how long a step takes.

    python benchmarks/models.py [--models bert,gpt] [--sizes table|usual] [--batch 16] [--rounds 5] [--json FILE]
        [--page docs/explanation/real-models.md]

Needs `pip install 'evenhand[bench]'` and `pip install --no-deps timm`; what cannot be imported is a row of the table.
Every model is compared with plain autograd on each record alone, in float64 where its code allows. Times are those of
the processor with one thread; the competitors take turns, and a ratio is the median over the rounds of the ratios to
plain SGD beside it. "loop" is our own: one record after the other, clipped and added up. Step numbers at which the
engine compares itself with autograd (2, 4, 8 ...) come before what is timed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_memory import status, trim
from engine_report import machine, paste
from evenhand.errors import EvenhandError
from evenhand.gradients import Engine
from evenhand.gradients.batch_utils import call, cast, take
from evenhand.gradients.doctor.timing import opacus_hooks, plain_step, private_step
from real_models import MODELS, USUAL_SIZES, Real

EXACT_RECORDS, WARM = 6, 9
PACKAGES = ("transformers", "peft", "timm", "opacus")
BAR = {"float64": 1e-7, "float32": 1e-3}
"""How far from autograd counts as wrong: parts of Gemma and Mamba compute in float32 whatever the precision."""
Row = dict[str, Any]
Step = Callable[[], None]


def built(real: Real) -> tuple[nn.Module, int]:
    """The model without dropout, and how many parameters the loss does not depend on, which are frozen."""
    model = real.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:  # functional dropout, and whole branches
                setattr(module, name, 0.0)
    inputs, targets = real.data(EXACT_RECORDS)
    loss = real.loss(call(model, inputs), targets).sum()
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    unused = [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    for parameter in unused:
        parameter.requires_grad_(False)
    return model, len(unused)


def one_by_one(model: nn.Module, real: Real, inputs: Any, targets: Tensor) -> list[list[Tensor]]:
    """Each record's gradients by plain autograd on the record alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(targets)):
        one = slice(i, i + 1)
        value = real.loss(call(model, take(inputs, one)), take(targets, one)).sum()
        rows.append(torch.autograd.grad(value, parameters, allow_unused=True))
    return [[torch.zeros_like(p) if g is None else g for p, g in zip(parameters, row, strict=True)] for row in rows]


def error_of(model: nn.Module, real: Real, dtype: torch.dtype) -> float:
    """The largest relative error of norms and of a weighted sum, over two batches."""
    model, worst = copy.deepcopy(model).to(dtype), 0.0
    engine = Engine(model, real.loss)
    for _ in range(2):
        inputs, targets = real.data(EXACT_RECORDS)
        inputs, targets = cast(inputs, dtype), cast(targets, dtype)
        rows = one_by_one(model, real, inputs, targets)
        norms = torch.stack([torch.stack([g.double().norm() for g in row]).norm() for row in rows])
        result = engine.run(inputs, targets)
        weights = torch.rand(len(rows), dtype=torch.float64) + 0.5
        total = list(result.weighted_sum(weights).values())
        wanted = [
            sum(w * g.double() for w, g in zip(weights, column, strict=True)) for column in zip(*rows, strict=True)
        ]
        apart = torch.stack([(a.double() - b).norm() for a, b in zip(total, wanted, strict=True)]).norm()
        length = torch.stack([b.norm() for b in wanted]).norm()
        errors = [float(((result.norm - norms).abs() / norms).max()), float(apart / length)]
        worst = max(worst, *[math.inf if math.isnan(error) else error for error in errors])
    return worst


def loop_step(model: nn.Module, real: Real, inputs: Any, targets: Tensor) -> Step:
    """A private step, one record after the other."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for i in range(len(targets)):
            one = slice(i, i + 1)
            value = real.loss(call(model, take(inputs, one)), take(targets, one)).sum()
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
            for part, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    part.add_(gradient, alpha=float((1.0 / norm).clamp(max=1.0)))
        for parameter, part in zip(parameters, total, strict=True):
            parameter.grad = part.add_(torch.randn_like(part)).div_(len(targets))
        optimizer.step()

    return step


def seconds(step: Step, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def times(model: nn.Module, real: Real, batch: int, rounds: int) -> Row:
    """Median ratio to plain SGD, with its lowest and highest, of everyone who can run the model."""
    inputs, targets = real.data(batch)
    makers: dict[str, Callable[[nn.Module], Step]] = {
        "SGD": lambda m: plain_step(m, real.loss, inputs, targets),
        "ours": lambda m: private_step(m, real.loss, inputs, targets),
        "loop": lambda m: loop_step(m, real, inputs, targets),
        "Opacus": lambda m: opacus_hooks(m, real.loss, inputs, targets),
    }
    steps: dict[str, Step] = {}
    found: Row = {}
    for name, make in makers.items():
        try:
            steps[name] = make(copy.deepcopy(model))
            seconds(steps[name], WARM if name == "ours" else 2)
        except Exception as error:
            steps.pop(name, None)
            found[name] = f"{type(error).__name__}"
    each: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            each[name].append(seconds(steps[name], 1))
    for name, column in each.items():
        ratios = [mine / plain for mine, plain in zip(column, each["SGD"], strict=True)]
        found[name] = [round(x, 2) for x in (statistics.median(ratios), min(ratios), max(ratios))]
    found["SGD"] = round(1e3 * statistics.median(each["SGD"]), 1)
    return found


def peak_of(step: Step) -> float:
    """MB above model, batch and libraries at the peak of three steps."""
    trim()
    before = status("VmRSS")
    seconds(step, 3)
    return round(status("VmHWM") - before, 1)


def examined(name: str, real: Real, options: argparse.Namespace, batch: int) -> Row:
    """One row of the table."""
    row: Row = {"model": name, "couples": real.couples, "batch": batch}
    torch.manual_seed(0)
    try:
        model, row["unused"] = built(real)
    except ImportError as error:
        return {**row, "result": f"not installed: {error.name}"}
    row["parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        engine = Engine(model, real.loss)
        for _ in range(2):
            engine.run(*real.data(batch))
    except EvenhandError as error:
        return {**row, "result": "refused", "reason": str(error)[:160]}
    apart = engine.apart()
    row |= {"result": "accepted", "way": engine.way(), "apart": len(apart), "loops": list(apart.values()).count("loop")}
    del engine
    if options.exact:
        for dtype in (torch.float64, torch.float32):
            try:
                row["error"], row["precision"] = error_of(model, real, dtype), str(dtype).removeprefix("torch.")
                break
            except RuntimeError:
                continue
    if options.time:
        row |= times(model, real, batch, options.rounds)
    if options.memory:
        makers = {"SGD MB": plain_step, "ours MB": private_step}
        row |= {
            name: peak_of(make(copy.deepcopy(model), real.loss, *real.data(batch))) for name, make in makers.items()
        }
    return row


HEAD = (
    "| model | result | way | largest relative error, or why, or memory "
    "| SGD ms | ours / SGD | loop / SGD | Opacus / SGD |\n"
    "|---|---|---|---|--:|--:|--:|--:|"
)


def line(row: Row) -> str:
    """A row as Markdown."""

    def ratio(name: str) -> str:
        value = row.get(name, "")
        return f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})" if isinstance(value, list) else str(value)

    notes = [f"{row['error']:.0e} {row['precision']}" if "error" in row else row.get("reason", "")[:60]]
    way = f"{row.get('way', '')}" + (f": {row['apart']}" if row.get("apart") else "")
    if "ours MB" in row:
        notes.append(f"{row['ours MB']:.0f} MB, SGD {row['SGD MB']:.0f} MB")
    cells = (
        row["model"],
        row["result"],
        way,
        "; ".join(filter(None, notes)),
        row.get("SGD", ""),
        *map(ratio, ("ours", "loop", "Opacus")),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def summary(rows: list[Row]) -> list[str]:
    """What the table comes to."""
    accepted = [row for row in rows if row["result"] == "accepted"]
    kernels = [row for row in accepted if row["way"].startswith("kernels")]
    pure = [row for row in accepted if row["way"] == "kernels"]
    slower = [row["model"] for row in accepted if _slower(row)]
    wrong = [row["model"] for row in accepted if row.get("error", 0) > BAR[row.get("precision", "float32")]]
    refused = [row["model"] for row in rows if row["result"] == "refused" and not row["couples"]]
    counts = f"{len(accepted)} accepted, {len(kernels)} by kernels ({len(pure)} without a module apart)"
    timed, compared = any("ours" in row for row in accepted), any("error" in row for row in accepted)
    return [
        f"{len(rows)} models: {counts}.",
        f"Refused although their records are independent: {refused or 'none'}.",
        f"Not exact: {wrong or 'none'}." if compared else "Exactness was not looked at (--no-exact).",
        f"Slower than our own loop: {slower or 'none'}." if timed else "Times were not taken (--no-time).",
    ]


def markdown(found: Row) -> str:
    """The table, what it comes to, and what it was measured on."""
    table = "\n".join([HEAD, *map(line, found["rows"])])
    facts = found["machine"]
    packages = ", ".join(f"{name} {facts[name]}" for name in ("torch", *PACKAGES) if facts.get(name))
    where = f"Measured in {found['rounds']} rounds on {facts['processor']}, {facts['cores']} cores, {packages}."
    return "\n\n".join([table, "\n".join(f"- {sentence}" for sentence in summary(found["rows"])), where])


def _slower(row: Row) -> bool:
    return isinstance(row.get("ours"), list) and isinstance(row.get("loop"), list) and row["ours"][0] > row["loop"][0]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="words in the names, separated by commas; default: all")
    parser.add_argument("--sizes", choices=["table", "usual"], default="table", help="66 small models, or usual sizes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-time", dest="time", action="store_false")
    parser.add_argument("--no-exact", dest="exact", action="store_false")
    parser.add_argument("--memory", action="store_true", help="also the peak of memory above the model")
    parser.add_argument("--json", type=Path, help="also write everything to this file, after each model")
    parser.add_argument("--page", type=Path, help="also put table and summary between the marks of this page")
    parser.add_argument("--again", type=Path, help="measure nothing, take the figures of this JSON file")
    return parser.parse_args()


def measured(options: argparse.Namespace) -> Row:
    """Rows of all models that were asked for, and where they were measured; each is printed when it is done."""
    cases = USUAL_SIZES if options.sizes == "usual" else {name: (real, options.batch) for name, real in MODELS.items()}
    words = [word.strip().lower() for word in options.models.split(",")]
    facts = machine() | {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    found: Row = {"sizes": options.sizes, "rounds": options.rounds, "machine": facts, "rows": []}
    print(HEAD)
    for name, (real, batch) in cases.items():
        if any(word in name.lower() for word in words):
            found["rows"].append(examined(name, real, options, batch))
            print(line(found["rows"][-1]), flush=True)
            gc.collect()
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + "\n".join(summary(found["rows"])))
    return found


def main() -> None:
    """Print the table and what it comes to; write JSON after each model, and at the end the page."""
    options = parsed()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = json.loads(options.again.read_text()) if options.again else measured(options)
    if options.page:
        paste(markdown(found), options.page, f"{found['sizes']} sizes")
    sys.exit(0 if found["rows"] else 1)


if __name__ == "__main__":
    main()

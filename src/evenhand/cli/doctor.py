"""``evenhand doctor``: can this model be trained privately, how, and at what cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenhand.cli import options
from evenhand.errors import EvenhandError, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from evenhand.gradients.doctor.doctor import Diagnosis
    from evenhand.gradients.doctor.fixes import Change
    from evenhand.gradients.doctor.timing import Timing
    from evenhand.types import Facts

NAME = "doctor"
EXAMPLE = "evenhand doctor --model cnn --input-shape 1,28,28 --classes 10 --bench"
ROUNDS = 9
MOST = 100_000
"""Classes of a made-up target."""


def run(
    model: Annotated[
        str,
        typer.Option("--model", help="Built in, such as mlp, or file.py:factory."),
    ],
    input_shape: Annotated[str, typer.Option("--input-shape", help="One record, without the batch, e.g. 1,28,28.")],
    classes: Annotated[
        int, typer.Option("--classes", help="Number of classes; 0 for any other output (squared error).")
    ] = 10,
    input_dtype: Annotated[
        str, typer.Option("--input-dtype", help="float32, float64, or long (indices, with --vocabulary).")
    ] = "float32",
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", help="With long inputs: indices are below this.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Made-up records per step.")] = 64,
    fix: Annotated[bool, typer.Option("--fix", help="Replace what cannot be trained, and examine that model.")] = False,
    bench: Annotated[
        bool, typer.Option("--bench", help="Time plain SGD, evenhand and, if installed, Opacus, taking turns.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Say which kernel serves which module, what is refused and why, and what a private step costs.

    Uses made-up records only. Exit code 0 if the model can be trained privately, 1 if not.
    """
    import torch

    from evenhand import _validate
    from evenhand.gradients import examine
    from evenhand.gradients import fix as fixed
    from evenhand.gradients.doctor import timing
    from evenhand.gradients.doctor.fixes import changes

    torch.manual_seed(0)
    size, shape = _validate.whole(batch, "batch"), _shape(input_shape)
    dtype = _dtype(input_dtype, vocabulary)
    if _validate.whole(classes, "classes", low=0) > MOST:
        raise UsageError(f"--classes takes at most {MOST}: say how many the model tells apart.")
    examined = _built(model, _facts(size, shape, dtype, classes)).train()
    done = changes(examined) if fix else ()
    examined = fixed(examined) if fix else examined
    inputs, targets = _made_up(size, shape, dtype, vocabulary, classes)
    loss = _cross_entropy if classes else _squared
    try:
        diagnosis = examine(examined, loss, inputs, targets, timed=not bench)
        rows: tuple[Timing, ...] = ()
        if bench and diagnosis.trainable:
            rows = timing.measure(examined, loss, inputs, targets, opacus=True, rounds=ROUNDS)
    except EvenhandError:
        raise
    except Exception as error:
        raise UsageError(
            f"The model failed on made-up records ({type(error).__name__}: {error}). Check --input-shape, "
            "--input-dtype, --vocabulary and --classes."
        ) from error
    options.emit(_data(diagnosis, done, rows), _text(diagnosis, done, rows, fix), json)
    if not diagnosis.trainable:
        raise typer.Exit(1)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError("--input-shape takes the sizes of one record, for example --input-shape 1,28,28.")
    return shape


def _dtype(name: str, vocabulary: int | None) -> str:
    from evenhand import _validate

    if _validate.known(name, ("float32", "float64", "long"), "input-dtype") != "long":
        if vocabulary is not None:
            raise UsageError("--vocabulary is for indices: add --input-dtype long.")
        return name
    if vocabulary is None:
        raise UsageError("Long inputs are indices: say how many there are, for example --vocabulary 1000.")
    _validate.whole(vocabulary, "vocabulary")
    return "int64"


def _facts(size: int, shape: tuple[int, ...], dtype: str, classes: int) -> Facts:
    from evenhand.types import Facts

    return Facts(size, (("all", size),), labels=tuple(map(str, range(classes))), inputs=f"{shape} {dtype}")


def _built(model: str, facts: Facts) -> nn.Module:
    from evenhand.models import build

    return build(model, facts)


def _made_up(size: int, shape: tuple[int, ...], dtype: str, vocabulary: int | None, classes: int) -> Any:
    import torch

    records = (
        torch.randint(vocabulary, (size, *shape))
        if vocabulary is not None
        else torch.randn(size, *shape, dtype=getattr(torch, dtype))
    )
    return records, torch.arange(size) % classes if classes else torch.randn(size)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets, reduction="none")


def _squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) - targets.to(outputs.dtype).unsqueeze(1)).square().mean(1)


def _data(diagnosis: Diagnosis, done: Sequence[Change], rows: Sequence[Timing]) -> dict[str, Any]:
    from evenhand.gradients import fast_paths
    from evenhand.mechanism import noise_native

    changed = [dataclasses.asdict(change) for change in done]
    timings = [dataclasses.asdict(row) for row in rows]
    facts = {"trainable": diagnosis.trainable, **dataclasses.asdict(diagnosis), "fixed": changed, "bench": timings}
    return facts | {
        "compiled_noise": noise_native.loops() is not None,
        "compiled_layers": bool(fast_paths.fast().compiled()),
    }


def _text(diagnosis: Diagnosis, done: Sequence[Change], rows: Sequence[Timing], fix: bool) -> str:
    import torch

    from evenhand.gradients import fast_paths
    from evenhand.mechanism import noise_native

    parts = []
    if fix:
        parts += ["Fixed, as evenhand.gradients.fix(model) does:", *(f"  {change}" for change in done or ())]
        parts += ["", str(diagnosis)] if done else ["  nothing to replace", "", str(diagnosis)]
    else:
        parts.append(str(diagnosis))
    if noise_native.loops() is None:
        parts.append(
            "Noise is made in Python, several times slower: install a C compiler (gcc or clang), then evenhand again."
        )
    elif not fast_paths.fast().compiled():
        parts.append(
            "The compiled loops for small models are missing or wrong: their steps take longer. Install evenhand again."
        )
    if diagnosis.fixable and not diagnosis.trainable:
        parts.append("Add --fix to examine the model with these replaced.")
    if rows:
        parts += ["", f"{'':<14}{'ms a step':>10}{'times SGD':>11}"]
        parts += [f"{row.name:<14}{_cells(row)}" for row in rows]
        threads = f"{torch.get_num_threads()} thread(s)"
        parts.append(
            f"(median of {ROUNDS} rounds, taking turns, {threads}; with noise of torch's generator, without a ledger)"
        )
    return "\n".join(parts)


def _cells(row: Timing) -> str:
    if row.milliseconds is None or row.ratio is None:
        return f"  {row.error}"
    return f"{row.milliseconds:>10.2f}{row.ratio:>11.2f}"

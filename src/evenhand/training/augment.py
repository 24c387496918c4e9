"""Random views of records: plain functions on a batch of images, and K views of a record averaged BEFORE clipping.

However many views it has, a record has one loss (their mean), one gradient and one bound, so views cost no privacy. The
draws come from the global generators of torch, numpy or ``random``, which a private step sets from a secret of its own:
were they known, one record more would shift the draws of all others. What is asked of them is in
docs/proofs/random_draws.md: how a record's view is distributed must not depend on how many others there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from evenhand import _validate, generators
from evenhand.errors import UnsupportedModelError, UsageError

Augment = Callable[[Any], Any]
PIXELS = 4
DRAWS, SECONDS = 200, 1.0
"""Random views of a record that are compared when the size of its batch changes, and when to be content with fewer."""


def random_flip(inputs: Tensor) -> Tensor:
    """Return each image mirrored left to right or not, by its own coin. The last dimension is the width.

    Examples:
      >>> flipped = random_flip(torch.tensor([[[1.0, 2.0]]] * 50))
      >>> sorted({tuple(row) for row in flipped.flatten(1).tolist()})
      [(1.0, 2.0), (2.0, 1.0)]
    """
    heads = torch.rand(len(inputs), device=inputs.device) < 0.5
    return torch.where(heads.view(-1, *[1] * (inputs.dim() - 1)), inputs.flip(-1), inputs)


def random_shift(inputs: Tensor, pixels: int = PIXELS) -> Tensor:
    """Return each image moved by up to ``pixels`` in both directions, by its own draw; zeros fill the edge.

    The last two dimensions are height and width: (B, H, W) or (B, C, H, W).

    Examples:
      >>> random_shift(torch.ones(2, 3, 8, 8), pixels=2).shape
      torch.Size([2, 3, 8, 8])
    """
    _validate.whole(pixels, "pixels", low=0)
    size, (height, width) = len(inputs), inputs.shape[-2:]
    images = functional.pad(inputs.reshape(size, -1, height, width), (pixels,) * 4)
    moves = (torch.rand(2, size, 1, device=inputs.device) * (2 * pixels + 1)).long().clamp(max=2 * pixels)
    down = moves[0] + torch.arange(height, device=inputs.device)
    across = moves[1] + torch.arange(width, device=inputs.device)
    record = torch.arange(size, device=inputs.device).view(-1, 1, 1)
    moved = images.permute(0, 2, 3, 1)[record, down.unsqueeze(2), across.unsqueeze(1)]
    return moved.permute(0, 3, 1, 2).reshape(inputs.shape)


@dataclass(frozen=True)
class Views:
    """``count`` random views of every record, made by ``augment``, in the second dimension (one view: none is added).

    If rows are persons with ``slots`` records each, in their second dimension, these are viewed one by one.

    Examples:
      >>> Views(random_flip, 3)(torch.zeros(5, 1, 8, 8)).shape
      torch.Size([5, 3, 1, 8, 8])
    """

    augment: Augment
    count: int = 1
    slots: int = 1

    def __post_init__(self) -> None:
        _validate.whole(self.count, "views")
        if not callable(self.augment):
            raise UsageError("augment must be a function that returns a random view of every record of a batch.")

    def __call__(self, inputs: Any) -> Any:
        """Return the views of a batch; an empty batch is returned as it is."""
        inputs, size = self._by_record(inputs), self.slots * _size(inputs)
        if not size:
            return inputs
        views = [self.augment(inputs) for _ in range(self.count)]
        if any(_size(view) != size for view in views):
            raise UsageError("augment must return one view per record: as many rows as it was given, in their order.")
        if self.count == 1:
            return self._by_person(views[0])
        trees = [tree_flatten(view) for view in views]
        stacked = [
            torch.stack(leaves, 1) if isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(leaves for leaves, _ in trees), strict=True)
        ]
        return self._by_person(tree_unflatten(stacked, trees[0][1]), self.count)

    def _by_record(self, inputs: Any) -> Any:
        """Return the records of all persons as rows of their own."""
        return inputs if self.slots == 1 else tree_map_only(Tensor, lambda leaf: leaf.flatten(0, 1), inputs)

    def _by_person(self, viewed: Any, views: int = 1) -> Any:
        """Return records as rows of persons, the views of a person's records next to each other."""
        if self.slots == 1:
            return viewed
        inner = 2 if views > 1 else 1
        return tree_map_only(Tensor, lambda leaf: leaf.reshape(-1, self.slots * views, *leaf.shape[inner:]), viewed)

    def check(self, inputs: Any) -> None:
        """Raise unless a record's view stays the same, for the same draws, when the others' values change.

        Mixing records (mixup, cutmix) would put one record into another's gradient, which is not bounded for it.
        """
        inputs = self._by_record(inputs)
        for seed in range(4):
            with generators.drawing(seed):
                before = self.augment(inputs)
            for row in range(_size(inputs)):
                company = tree_map_only(Tensor, partial(_others_changed, row=row), inputs)
                with generators.drawing(seed):
                    after = self.augment(company)
                if not all(_same(a[row], b[row]) for a, b in zip(_tensors(before), _tensors(after), strict=True)):
                    raise UnsupportedModelError(
                        "The view of a record changed when the other records did, so its gradient is not its own. "
                        "Augment every record by itself (no mixup), with draws from a global generator (torch, numpy "
                        "or random), not from one of your own."
                    )
        self._check_sizes(inputs)

    def _check_sizes(self, inputs: Any) -> None:
        """Raise if the distribution of a record's view depends on the size of its batch, as far as 200 draws tell.

        Means and spreads with all rows and with one row less are compared in a few fixed directions.
        """
        size = _size(inputs)
        if size < 2:
            return
        fewer = tree_map_only(Tensor, lambda leaf: leaf[:-1] if leaf.dim() else leaf, inputs)
        pairs, until = [], time.monotonic() + SECONDS
        for seed in range(DRAWS):
            pairs.append((_projected(self._drawn(inputs, 2 * seed)), _projected(self._drawn(fewer, 2 * seed + 1))))
            if seed >= 16 and time.monotonic() > until:
                break
        some, others = (torch.stack(side) for side in zip(*pairs, strict=True))
        for one, two in ((some, others), ((some - some.mean(0)).abs(), (others - others.mean(0)).abs())):
            error = ((one.var(0) + two.var(0)) / len(pairs)).sqrt()
            slack = 1e-6 * (one.abs().amax(0) + two.abs().amax(0))
            if bool(((one.mean(0) - two.mean(0)).abs() > 6.0 * error + slack).any()):
                raise UnsupportedModelError(
                    "How a record's view is drawn depends on how many records are in the batch, so that one more "
                    "changes the views of all others. Draw for every row by itself, in the same way whatever their "
                    "number; scale nothing by it."
                )

    def _drawn(self, inputs: Any, seed: int) -> Any:
        """Return one view of every record, drawn from this seed."""
        with generators.drawing(seed):
            return self.augment(inputs)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of views for a checkpoint, so that a resumed run must have as many."""
        return {"views": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless the run was started with as many views."""
        if state["views"] != self.count:
            raise UsageError(f"The run was started with views={state['views']}: resume it with as many.")


def views_of(augment: str | Augment | None, views: int) -> Views | None:
    """Return both settings as one object; None if nothing is augmented.

    Examples:
      >>> views_of(None, 1) is None, views_of("flip", 4).count
      (True, 4)
    """
    if augment is None and views != 1:
        raise UsageError("views=K needs augment=: without it all views of a record would be the same.")
    return None if augment is None else Views(named(augment), views)


def named(augment: str | Augment) -> Augment:
    """Return the function named: flip, shift, shift:2 (pixels), or several joined by "+"; a function stays as it is.

    Examples:
      >>> named("flip+shift:1")(torch.ones(2, 1, 8, 8)).shape
      torch.Size([2, 1, 8, 8])
    """
    return Named(augment) if isinstance(augment, str) else augment


@dataclass(frozen=True)
class Named:
    """Random flips and shifts of pictures, as a config names them.

    Examples:
      >>> Named("shift:1")(torch.zeros(2, 8, 8)).shape
      torch.Size([2, 8, 8])
    """

    name: str

    def __post_init__(self) -> None:
        for part in self.name.split("+"):
            kind, colon, pixels = part.partition(":")
            _validate.known(kind, ("flip", "shift"), "augmentation")
            if colon and not (kind == "shift" and pixels.isdecimal()):
                raise UsageError("Only a shift takes a number, its pixels: shift:2, or flip+shift:2.")

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return a random view of every picture."""
        if not isinstance(inputs, Tensor) or inputs.dim() < 3:
            raise UsageError(
                f"augment={self.name!r} flips and shifts pictures, and these records are none (height and width come "
                "last): leave it out, or give a function of your own in Python."
            )
        for part in self.name.split("+"):
            kind, _, pixels = part.partition(":")
            inputs = random_flip(inputs) if kind == "flip" else random_shift(inputs, int(pixels or PIXELS))
        return inputs


def _size(inputs: Any) -> int:
    return next((len(leaf) for leaf in _tensors(inputs)), 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()]


def _projected(view: Any) -> Tensor:
    """Return the first record's view, projected on a few fixed directions."""
    rows = [torch.nan_to_num(leaf[0].detach().cpu().double().flatten(), 0.0, 0.0, 0.0) for leaf in _tensors(view)]
    flat = torch.cat(rows)
    waves = torch.arange(1, 5, dtype=torch.float64)[:, None] * torch.arange(len(flat), dtype=torch.float64)
    return torch.cat([torch.cos(0.7 * waves) @ flat, flat.sum()[None]])


def _others_changed(leaf: Tensor, row: int) -> Tensor:
    """Return the batch with all rows but one in reverse order and, if they are floats, halved."""
    changed = leaf.flip(0)
    changed = changed * 0.5 if leaf.is_floating_point() else changed
    changed[row] = leaf[row]
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))

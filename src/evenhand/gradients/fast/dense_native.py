"""The compiled loops of dense models (``dense.c``), if the installation could build them: one call for many of torch's.

They read and write float32 tables of the CPU, rows after rows without gaps; ``fits`` says whether a tensor is one. As
with the noise, they are compared with numpy when they are loaded.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from evenhand._native import NativeLibrary
from evenhand.gradients.row_norms import ROW_LIMIT

NARROW = 16
"""Outputs that a layer may have to be computed here; torch is as quick for more."""
_SHAPES = ((1, 1, 1), (3, 5, 2), (67, 150, 10), (130, 33, NARROW), (8, 16, 5), (66, 531, 4))
"""Rows, inputs and outputs that the loops are compared on."""


class DenseLoops:
    """The functions of the library."""

    def __init__(self, library: ctypes.CDLL):
        whole, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        self._norms, self._outputs = library.evenhand_norms, library.evenhand_outputs
        self._sums, self._slopes = library.evenhand_sums, library.evenhand_slopes
        self._norms.argtypes = (whole, whole, address, address, address, number, address)
        self._outputs.argtypes = (address, whole, whole, address, address, whole, address)
        self._sums.argtypes = (address, address, address, whole, whole, whole, address, address)
        self._slopes.argtypes = (address, whole, whole, address, address, address)
        self._bounded, self._straight = library.evenhand_bounded, library.evenhand_straight
        self._straight.argtypes = (address, address, whole)
        self._scaled = library.evenhand_scaled
        self._scaled.argtypes = (address, address, whole, whole, address)
        self._bounded.argtypes = (address, address, address, address, whole, whole, number, address)
        self._norms.restype = self._slopes.restype = self._bounded.restype = whole
        self._outputs.restype = self._sums.restype = self._straight.restype = self._scaled.restype = None

    def norms(self, layers: Sequence[tuple[Tensor, Tensor, bool, bool]]) -> tuple[Tensor, bool]:
        """Return each record's norm, in float64, and whether all are in the range of float32.

        ``layers`` are inputs (B, in), output gradients (B, out), and whether weight and bias count.
        """
        rows = layers[0][0].shape[0]
        _demand(all(x.dim() == grad.dim() == 2 and x.shape[0] == grad.shape[0] == rows for x, grad, *_ in layers))
        norm = layers[0][0].new_empty(rows, dtype=torch.float64)
        inputs = array("Q", [x.data_ptr() for x, *_ in layers])
        slopes = array("Q", [grad.data_ptr() for _, grad, *_ in layers])
        shape = array("q", [n for x, g, weight, bias in layers for n in (x.shape[1], g.shape[1], weight, bias)])
        places = [column.buffer_info()[0] for column in (inputs, slopes, shape)]
        return norm, not self._norms(len(layers), rows, *places, ROW_LIMIT, norm.data_ptr())

    def outputs(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``, transposed: one row per output."""
        (rows, width), count = x.shape, weight.shape[0]
        _demand(weight.shape == (count, width) and (bias is None or bias.shape == (count,)))
        out = x.new_empty(count, rows)
        to = None if bias is None else bias.data_ptr()
        self._outputs(x.data_ptr(), rows, width, weight.data_ptr(), to, count, out.data_ptr())
        return out

    def sums(self, x: Tensor, grad: Tensor, weights: Tensor, weight: bool, bias: bool) -> tuple[Tensor, Tensor]:
        """Return ``sum_i weights_i grad_i x_i^T`` and ``sum_i weights_i grad_i``; what is not asked for is empty."""
        (rows, width), count = x.shape, grad.shape[1]
        _demand(grad.shape[0] == rows and weights.shape == (rows,) and count <= NARROW and is_column(weights))
        products, slopes = x.new_empty(count if weight else 0, width), x.new_empty(count if bias else 0)
        to = products.data_ptr() if weight else None, slopes.data_ptr() if bias else None
        self._sums(x.data_ptr(), grad.data_ptr(), weights.data_ptr(), rows, width, count, *to)
        return products, slopes

    def scaled(self, grad: Tensor, weights: Tensor) -> Tensor:
        """Multiply every row by its weight, in place; the sum of the rows that come out."""
        rows, count = grad.shape
        _demand(weights.shape == (rows,) and is_column(weights))
        total = grad.new_empty(count)
        self._scaled(grad.data_ptr(), weights.data_ptr(), rows, count, total.data_ptr())
        return total

    def slopes(self, across: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cross-entropy (float64) and its gradient (B, C) of outputs (C, B); None for a label without output."""
        classes, rows = across.shape
        _demand(targets.shape == (rows,) and classes <= NARROW and is_column(targets))
        loss, grad = across.new_empty(rows, dtype=torch.float64), across.new_empty(rows, classes)
        odd = self._slopes(across.data_ptr(), rows, classes, targets.data_ptr(), loss.data_ptr(), grad.data_ptr())
        return None if odd else (loss, grad)

    def straighten(self, grad: Tensor, out: Tensor) -> Tensor:
        """Return the gradient of a ReLU's input, written over that of its output."""
        _demand(grad.shape == out.shape)
        self._straight(grad.data_ptr(), out.data_ptr(), grad.numel())
        return grad

    def bounded(self, weights: Tensor, norm: Tensor, owner: Tensor, sensitivity: Tensor, most: float) -> Tensor:
        """Return ``0 <= weight <= sensitivity / norm``, for columns as ``is_column`` takes them."""
        rows, classes = weights.shape[0], sensitivity.shape[0]
        _demand(norm.shape[0] == owner.shape[0] == rows)
        out = torch.empty_like(weights)
        columns = [column.data_ptr() for column in (weights, norm, owner, sensitivity)]
        if self._bounded(*columns, classes, rows, most, out.data_ptr()):
            raise IndexError("a record has an owner that the plan does not know")
        return out


def _demand(fitting: bool) -> None:
    """Check shapes here: the C functions do not."""
    if not fitting:
        raise ValueError("tables of these shapes do not belong together")


def fits(table: Tensor) -> bool:
    """Return whether the loops can read this.

    >>> fits(torch.ones(2, 3)), fits(torch.ones(2, 3).t()), fits(torch.ones(2, 3).double())
    (True, False, False)
    """
    return table.dtype == torch.float32 and table.is_cpu and table.is_contiguous() and not table.is_neg()


def is_column(values: Tensor) -> bool:
    """Return whether this is a column that the loops can read: numbers are float64, owners int64.

    >>> is_column(torch.ones(2).double()), is_column(torch.ones(2)), is_column(torch.ones(4).double()[::2])
    (True, False, False)
    """
    kind = torch.float64 if values.is_floating_point() else torch.int64
    return (
        values.dtype == kind and values.dim() == 1 and values.is_cpu and values.is_contiguous() and not values.is_neg()
    )


def right(compiled: DenseLoops) -> bool:
    """Return whether the loops agree with torch in float64: all remainders, extreme rows, labels without output."""
    with torch.device("cpu"):  # whatever the user's default is
        return all(_right_for(compiled, *shape) for shape in _SHAPES)


def _right_for(compiled: DenseLoops, rows: int, width: int, count: int) -> bool:
    x, grad, weight = _sample(rows, width), _sample(rows, count).flip(0), _sample(count, width)
    bias, scale, labels = weight.sum(1), torch.arange(rows).double() / rows, torch.arange(rows) % count
    x[0] *= 1e-25  # squares that float32 cannot hold
    grad[0] *= 1e25
    x[-1] *= 1e25
    return (
        _right_norms(compiled, x, grad)
        and _near(compiled.outputs(x, weight, bias).t(), x, weight.t(), bias)
        and _near(compiled.outputs(x, weight, None).t(), x, weight.t())
        and _right_sums(compiled, _sample(rows, width), grad, scale)
        and _right_slopes(compiled, _sample(count, rows) * 500, labels)
        and _right_bounds(compiled, x.double().square().sum(1), scale)
        and _right_scaled(compiled, _sample(rows, count), scale)
        and _right_scaled(compiled, _sample(rows, width), scale)
        and _right_straight(compiled, _sample(rows, width), _sample(width, rows).t().contiguous())
    )


def _sample(rows: int, width: int) -> Tensor:
    """Return numbers without a pattern, from -2 to 2."""
    return torch.arange(1, rows * width + 1).double().square_().mul_(0.7).cos_().mul_(2).float().view(rows, width)


def _near(product: Tensor, left: Tensor, right: Tensor, offset: Tensor | None = None) -> bool:
    """Return whether a product of matrices is right to the rounding of its terms."""
    left, right = left.double(), right.double()
    exact, terms = left @ right, left.abs() @ right.abs()
    if offset is not None:
        exact, terms = exact + offset, terms + offset.abs()
    return bool(((product - exact).abs() <= 1e-5 * terms).all())


def _right_norms(compiled: DenseLoops, x: Tensor, grad: Tensor) -> bool:
    inputs, slopes = x.double().square().sum(1), grad.double().square().sum(1)
    for weight, bias, again in ((True, True, 0), (True, False, 0), (False, True, 0), (True, True, 1)):
        norm, clean = compiled.norms([(x, grad, weight, bias), (x, grad, False, True)][: 1 + again])
        exact = (slopes * (inputs * weight + bias + again)).sqrt_()
        if clean != bool((exact <= ROW_LIMIT).all()) or not bool(((norm - exact).abs() <= 1e-6 * exact).all()):
            return False
    return True


def _right_sums(compiled: DenseLoops, x: Tensor, grad: Tensor, scale: Tensor) -> bool:
    scaled, ones = grad.double() * scale.unsqueeze(1), torch.ones(len(x), 1)
    products, slopes = compiled.sums(x, grad, scale, True, True)
    alone = compiled.sums(x, grad, scale, True, False)[0], compiled.sums(x, grad, scale, False, True)[1]
    same = torch.equal(products, alone[0]) and torch.equal(slopes, alone[1])
    return same and _near(products, scaled.t(), x) and _near(slopes.unsqueeze(1), scaled.t(), ones)


def _right_slopes(compiled: DenseLoops, across: Tensor, labels: Tensor) -> bool:
    likely = across.double().log_softmax(0).t()
    one_hot = functional.one_hot(labels, len(across)).double()
    loss_and_gradient, outside = compiled.slopes(across, labels), labels.clone()
    for label in (-1, len(across)):
        outside[-1] = label
        if compiled.slopes(across, outside) is not None:
            return False
    if loss_and_gradient is None:
        return False
    loss, grad = loss_and_gradient
    exact = -(likely * one_hot).sum(1)
    return bool(((loss - exact).abs() <= 1e-13 * (1 + exact)).all()) and bool(
        ((grad - (likely.exp() - one_hot)).abs() <= 1e-7).all()
    )


def _right_bounds(compiled: DenseLoops, norm: Tensor, weights: Tensor) -> bool:
    """Compare the projection, also where weight or norm is no usable number."""
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 0.0, 1e-300, 1e300], dtype=torch.float64)
    weights = torch.cat([weights, odd.repeat(len(odd)), weights + 3])
    norm = torch.cat([norm, odd.repeat_interleave(len(odd)), norm])
    owner, sensitivity = torch.arange(len(norm)) % 2, torch.tensor([1.0, 0.3], dtype=torch.float64)
    usable = torch.isfinite(weights) & (norm > 0)
    exact = torch.where(usable, torch.minimum(weights, sensitivity[owner] / norm), 0.0).clamp_(0.0, 1e30)
    try:
        compiled.bounded(weights, norm, owner, sensitivity[:1], 1e30)
    except IndexError:
        return torch.equal(compiled.bounded(weights, norm, owner, sensitivity, 1e30), exact)
    return False


def _right_scaled(compiled: DenseLoops, grad: Tensor, scale: Tensor) -> bool:
    exact = grad * scale.float().unsqueeze(1)
    total = compiled.scaled(grad, scale)
    return torch.equal(grad, exact) and _near(total.unsqueeze(0), torch.ones(1, len(exact)), exact)


def _right_straight(compiled: DenseLoops, grad: Tensor, out: Tensor) -> bool:
    out.view(-1)[:: 1 + out.numel() // 3] = 0.0
    out.view(-1)[-1] = torch.nan
    exact = torch.where(out <= 0, 0.0, grad)
    return torch.equal(compiled.straighten(grad, out), exact)


loops = functools.cache(NativeLibrary("_dense.so", DenseLoops, right).load)
"""Return the compiled loops, or None if they are not there or do not compute what they should."""


def bounded_weights(weights: Tensor, norm: Tensor, owner: Tensor, sensitivity: Tensor, most: float) -> Tensor | None:
    """Return ``0 <= weight <= sensitivity / norm`` in memory of its own; None if the loops cannot read these columns.

    >>> bounded_weights(torch.ones(1), torch.ones(1), torch.zeros(1).long(), torch.ones(1), 1e30) is None  # float32
    True
    """
    compiled = loops()
    if compiled is None or not all(map(is_column, (weights, norm, owner, sensitivity))):
        return None
    return compiled.bounded(weights, norm, owner, sensitivity, most)

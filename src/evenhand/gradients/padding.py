"""What a convolution adds around its input."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn
from torch.nn import functional

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
Pads = Sequence[tuple[int, int]]
"""Before and after the input along each dimension."""


def flat(pads: Pads) -> list[int]:
    """As ``functional.pad`` takes them: the last dimension first.

    >>> flat([(1, 2), (3, 4)])
    [3, 4, 1, 2]
    """
    return [side for pair in reversed(pads) for side in pair]


def pads_of(module: Conv) -> Pads:
    """What is added before and after the input along each dimension.

    >>> pads_of(nn.Conv2d(1, 1, (2, 3), padding="same"))
    [(0, 1), (1, 1)]
    """
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    if module.padding == "same":
        totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(int(side), int(side)) for side in module.padding]


def surrounded(module: Conv, x: Tensor) -> tuple[Tensor, Pads]:
    """The input, and the zeros that belong around it; padding that is not zero is added now.

    >>> surrounded(nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), torch.tensor([[[1.0, 2.0]]]))
    (tensor([[[2., 1., 2., 1.]]]), [(0, 0)])
    """
    pads = pads_of(module)
    if module.padding_mode == "zeros":
        return x, pads
    return functional.pad(x, flat(pads), mode=module.padding_mode), [(0, 0)] * len(pads)

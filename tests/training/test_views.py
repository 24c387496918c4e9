"""Several views of a record: one loss, one gradient, one bound."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import evenhand as eh
from evenhand.data import Data, wrap
from evenhand.errors import UnsupportedModelError, UsageError
from evenhand.gradients import Engine, MicroBatches
from evenhand.gradients.record_by_record import Fallback
from evenhand.gradients.views import Viewed, mean_loss
from evenhand.runs.folder import Folder
from evenhand.training.augment import Views, random_flip, random_shift
from evenhand.training.guards.coupling_guard import Coupling

LOSS = nn.CrossEntropyLoss(reduction="none")
RECORDS, VIEWS = 5, 3


class Words(nn.Module):
    """An embedding used twice, with a position of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place, self.out = nn.Embedding(7, 4), nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(words) + self.place).mean(1) + self.table(words[:, :1]).squeeze(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 5 * 5, 3)
    )


def continuous(*shape: int) -> Tensor:
    return torch.randn(RECORDS, VIEWS, *shape, dtype=torch.float64)


CASES = {
    "mlp": (mlp, lambda: continuous(6)),
    "places": (lambda: nn.Sequential(mlp(), nn.Flatten(), nn.Linear(12, 3)), lambda: continuous(4, 6)),
    "cnn": (cnn, lambda: continuous(2, 5, 5)),
    "words": (Words, lambda: torch.randint(0, 7, (RECORDS, VIEWS, 6))),
}


def by_autograd(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[dict[str, Tensor]]:
    """The gradient of each record's mean loss over its views, by plain autograd on that record alone."""
    rows = []
    for views, target in zip(inputs, targets, strict=True):
        loss = LOSS(model(views), target.repeat(len(views))).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    return rows


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("limit", [None, 2])
def test_a_record_has_the_gradient_of_its_mean_loss(
    kind: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[kind][0]().double(), CASES[kind][1]()
    targets = torch.tensor([0, 1, 2, 1, 0])
    expected = by_autograd(model, inputs, targets)
    engine = MicroBatches(Viewed(model, VIEWS), mean_loss(LOSS, VIEWS), limit=limit)
    monkeypatch.setattr(Fallback, "run", None)  # kernels serve views: falling back would fail here
    for _ in range(2):  # the second batch is not verified any more
        result = engine.run(inputs, targets)
        norms = torch.stack([torch.cat([g.flatten() for g in row.values()]).norm() for row in expected])
        torch.testing.assert_close(result.norm, norms, rtol=1e-9, atol=1e-12)
        weights = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
        total = result.weighted_sum(weights)
        for name, _ in model.named_parameters():
            wanted = sum(w * row[name] for w, row in zip(weights, expected, strict=True))
            torch.testing.assert_close(total[f"model.{name}"], wanted, rtol=1e-9, atol=1e-12)


def test_a_model_without_kernels_has_exact_views_too() -> None:
    torch.manual_seed(0)
    bilinear = nn.Bilinear(3, 3, 3).double()

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = bilinear

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x)

    model, inputs, targets = Squared(), continuous(3), torch.tensor([0, 1, 2, 1, 0])
    result = Engine(Viewed(model, VIEWS), mean_loss(LOSS, VIEWS)).run(inputs, targets)
    norms = [torch.cat([g.flatten() for g in row.values()]).norm() for row in by_autograd(model, inputs, targets)]
    torch.testing.assert_close(result.norm, torch.stack(norms), rtol=1e-9, atol=1e-12)


def test_images_move_each_by_its_own_draw() -> None:
    torch.manual_seed(0)
    images = torch.arange(1.0, 26.0).view(1, 1, 5, 5).repeat(200, 2, 1, 1)
    moved = random_shift(images, pixels=1)
    places = {tuple(image[0, 2].tolist()) for image in moved}
    assert len(places) == 9
    for image in moved[:20]:
        assert torch.equal(image[0], image[1]), "channels move together"
        centre = int(image[0, 2, 2]) - 1
        down, across = divmod(centre, 5)
        inside = torch.zeros(7, 7)
        inside[1:6, 1:6] = images[0, 0]
        assert torch.equal(image[0], inside[down - 1 : down + 4, across - 1 : across + 4])
    flipped = random_flip(images)
    assert {bool(torch.equal(image, images[0])) for image in flipped} == {True, False}
    assert all(torch.equal(image, images[0]) or torch.equal(image.flip(-1), images[0]) for image in flipped)


def mixup(inputs: Tensor) -> Tensor:
    return 0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs))]


def centred(inputs: Tensor) -> Tensor:
    return inputs - inputs.mean(0)


@pytest.mark.parametrize("augment", [mixup, centred, lambda x: x.flip(0)])
def test_views_that_mix_records_are_refused_before_spending(augment: object, tiny: Data, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="other records did"):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, augment=augment, views=2, out=tmp_path)
    assert Folder(tmp_path).ledger().reserved == 0


def test_views_that_change_the_number_of_rows_are_refused(tiny: Data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one view per record"):
        Views(lambda x: torch.cat([x, x]))(torch.zeros(2, 3))
    with pytest.raises(UsageError, match="needs augment="):
        eh.fit(nn.Linear(3, 2), tiny, epsilon=3.0, views=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def pictures() -> Data:
    torch.manual_seed(1)
    return wrap(torch.randn(60, 1, 6, 6), [i % 2 for i in range(60)])


def test_training_with_views_keeps_names_and_stops_without_its_augmentation(tmp_path: Path) -> None:
    data, shift = pictures(), partial(random_shift, pixels=1)
    plan = eh.plan("dpsgd", eh.Privacy(3, 1e-3), data=data.facts, epochs=2, batch_size=10)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    keys = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with eh.attach(model, optimizer, LOSS, plan, out=tmp_path, augment=shift, views=4) as private:
        for batch in private.batches(data):
            assert len(private.step(batch)) == len(batch)
            if private.position == 5:
                private.checkpoint()
                break
    assert list(model.state_dict()) == keys
    with pytest.raises(UsageError, match="pass augment= again"):
        eh.resume(tmp_path, model=model, train=data)
    with pytest.raises(UsageError, match="views=4"):
        eh.resume(tmp_path, model=model, train=data, augment=shift, views=2)
    run = eh.resume(tmp_path, model=model, train=data, augment=shift, views=4)
    assert run.folder.ledger().reserved == plan.steps
    assert eh.verify(tmp_path)["ok"]


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))


def test_views_by_name_are_kept_in_the_config_and_found_by_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    shift = random_shift

    def watched(inputs: Tensor, pixels: int) -> Tensor:
        seen.append((len(inputs), pixels))
        return shift(inputs, pixels)

    monkeypatch.setattr("evenhand.training.augment.random_shift", watched)
    data, out = pictures(), tmp_path / "run"
    stop: list[int] = []

    def after_start(plan: object, seconds: float) -> None:
        stop.append(1)
        raise KeyboardInterrupt

    options = {"epsilon": 3.0, "delta": 1e-2, "epochs": 1, "batch_size": 20, "out": out}
    with pytest.raises(KeyboardInterrupt):
        eh.fit(small_cnn(), data, augment="flip+shift:1", views=3, on_start=after_start, **options)
    assert stop
    config = (out / "config.toml").read_text()
    assert 'augment = "flip+shift:1"' in config
    assert "views = 3" in config
    seen.clear()
    eh.resume(out, model=small_cnn(), train=data)
    assert {pixels for _, pixels in seen} == {1}
    probed = {3, 4}
    batches = [size for size, _ in seen if size not in probed]
    assert len(batches) % 3 == 0
    assert batches[0::3] == batches[1::3] == batches[2::3]


def test_a_comparison_may_give_one_line_more_views() -> None:
    from evenhand.comparison import sweep

    variants = {"4 views": {"method": "dpsgd", "augment": "shift", "views": 4}}
    values = {"methods": ["dpsgd"], "variants": variants, "epsilons": [3.0], "seeds": 1, "compose": False}
    plain, viewed = [cell.config for cell in sweep.sweep(values).cells()]
    assert (plain.augment, plain.views, viewed.augment, viewed.views) == (None, 1, "shift", 4)


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        ("shft", "Did you mean 'shift'"),
        ("flip:2", "Only a shift takes a number"),
        ("shift:a", "Only a shift takes a number"),
        ("shift", "these records are none"),
    ],
)
def test_mistakes_in_names_are_found_before_anything_is_spent(
    augment: str, words: str, tiny: Data, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        eh.fit(nn.Linear(2, 2), tiny, epsilon=3.0, epochs=1, augment=augment, out=tmp_path / "run")
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert not ledger.exists() or Folder(tmp_path / "run").ledger().reserved == 0


def test_views_do_not_change_the_noise(tiny: Data, tmp_path: Path) -> None:
    """Equal views are one view: the same seed gives the same weights, so views change neither noise nor charge."""
    found, announced = [], []
    for views in (1, 3):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        run = eh.fit(
            model,
            tiny,
            epsilon=3.0,
            epochs=2,
            augment=lambda x: x,
            views=views,
            insecure_seed=3,
            compose=False,
            out=tmp_path / str(views),
            on_start=lambda plan, seconds: announced.append(seconds),
        )
        found.append((model.weight.detach().clone(), run.plan.digest, run.privacy.epsilon))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert found[0][1:] == found[1][1:]
    assert len(announced) == 2
    assert min(announced) > 0


def test_the_draws_of_a_step_do_not_follow_the_seed_that_everybody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known draws would couple records: one record more shifts those of all others."""
    monkeypatch.setattr(Coupling, "prepare", lambda *_: None)  # looks repeat a pass with the same draws
    seen: list[torch.Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and len(x) > 4:
                seen.append(torch.rand(4))
            out: torch.Tensor = self.inner(x)
            return out

    data = eh.data.wrap(torch.randn(200, 3), torch.randint(2, (200,)), labels=["0", "1"])
    discarded = []
    for name in ("a", "b"):
        discarded.append(len(seen))  # the first pass that draws is run again with secret draws, and not used
        torch.manual_seed(0)
        before = torch.get_rng_state()
        eh.fit(Watching(), data, epsilon=3.0, epochs=1, batch_size=100, compose=False, out=tmp_path / name)
        torch.set_rng_state(before)
    used = [values for place, values in enumerate(seen) if place not in discarded]
    drawn = {tuple(values.tolist()) for values in used}
    assert len(drawn) == len(used) > 2

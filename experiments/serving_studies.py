"""The studies of serving.py: data, recipe, and the lines that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """One way to train: a method with settings, an optimizer, and the strength of the offset in the loss."""

    name: str
    method: str = "dpsgd"
    settings: tuple[tuple[str, float | str], ...] = (("bound", 0.1),)
    optimizer: str = "sgd"
    tau: float = 0.0
    rates: tuple[float, ...] = (8.0, 32.0, 128.0)
    tuned_as: str = ""


@dataclass(frozen=True)
class Study:
    """One data set with a recipe. ``rare`` is a class, by number, and how many of its training records are kept."""

    name: str
    title: str
    source: str
    features: str
    lines: tuple[Line, ...]
    batch: int
    epochs: int
    epsilons: tuple[float, ...]
    average: float = 0.95
    delta: float = 1e-5
    rare: tuple[int, int] | None = None
    words: Mapping[str, str] = field(default_factory=dict, hash=False)

    def line(self, name: str) -> Line:
        """Return the line of this name."""
        return next(line for line in self.lines if line.name == name)


BOUND = (("bound", 0.1),)
ADAM = (0.001, 0.004, 0.016)
SERVED = (
    Line("DP-SGD"),
    Line("DP-SGD, offset 2 in the loss", tau=2.0),
)
OTHERS = (
    Line("naive", "naive"),
    Line("DPSGD-F", "dpsgd_f"),
    Line("DPSGD-F without memory", "dpsgd_f", (*BOUND, ("memory", "none"))),
    Line("bounded adaptive", "bounded_adaptive"),
    Line("SoftAdaClip", "soft_ada_clip"),
    Line("DP-AdamBC", optimizer="adam_bc", rates=ADAM),
)
STUDIES = {
    study.name: study
    for study in (
        Study(
            name="mnist8",
            title="Unbalanced MNIST: every class served",
            source="mnist",
            features="scattering",
            lines=(*SERVED, *OTHERS),
            batch=4096,
            epochs=20,
            epsilons=(3.0, 1.0),
            rare=(8, 500),
        ),
        Study(
            name="ham",
            title="HAM10000: every diagnosis served",
            source="ham10000-200x150",
            features="efficientnet_lite0",
            lines=(*SERVED, *OTHERS),
            batch=1024,
            epochs=40,
            epsilons=(3.0, 8.0),
        ),
        Study(
            name="cifar",
            title="All of CIFAR-10 on backbone features",
            source="cifar10",
            features="efficientnet_lite0",
            lines=SERVED[:1],
            batch=4096,
            epochs=20,
            epsilons=(3.0, 1.0),
        ),
        Study(
            name="cifar_rare",
            title="CIFAR-10 with one rare class",
            source="cifar10",
            features="efficientnet_lite0",
            lines=(*SERVED, *OTHERS[:2]),
            batch=4096,
            epochs=20,
            epsilons=(3.0, 1.0),
            rare=(8, 455),
        ),
    )
}

"""Instance-level smoothing: the published form of paper 002, which has no guarantee, and forms that are truly private.

``PublishedSmoothing`` is for study only. ``RandomFeatureDensity``, ``MomentDensity`` and ``NoisyEmbeddingDensity`` are
sound; docs/explanation/density.md says when to use which.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenhand.density.kernel_density import Bandwidth, histograms, mean_distances
    from evenhand.density.moment import MomentDensity
    from evenhand.density.noisy_embedding import NoisyEmbeddingDensity
    from evenhand.density.published_smoothing import ClaimedFigures, ClassDensities, PublishedSmoothing, auc_by_class
    from evenhand.density.random_feature import RandomFeatureDensity

_PUBLIC = {
    "Bandwidth": "kernel_density",
    "ClaimedFigures": "published_smoothing",
    "ClassDensities": "published_smoothing",
    "MomentDensity": "moment",
    "NoisyEmbeddingDensity": "noisy_embedding",
    "PublishedSmoothing": "published_smoothing",
    "RandomFeatureDensity": "random_feature",
    "auc_by_class": "published_smoothing",
    "histograms": "kernel_density",
    "mean_distances": "kernel_density",
}
METHODS = {
    "random_feature_density": "RandomFeatureDensity",
    "moment_density": "MomentDensity",
    "noisy_embedding_density": "NoisyEmbeddingDensity",
}
"""Sound densities by the name that ``evenhand train --method`` knows them by."""

_ELSEWHERE = ("epsilon", "delta", "noise", "classes", "seed", "insecure_seed", "out", "compose")
"""Arguments that a config has elsewhere than in its settings."""

__all__ = [
    "METHODS",
    "Bandwidth",
    "ClaimedFigures",
    "ClassDensities",
    "MomentDensity",
    "NoisyEmbeddingDensity",
    "PublishedSmoothing",
    "RandomFeatureDensity",
    "auc_by_class",
    "histograms",
    "mean_distances",
    "settings",
]


def settings(method: str) -> dict[str, Any]:
    """Return the settings of a density that ``--set key=value`` may change, with their defaults.

    Examples:
      >>> settings("moment_density")
      {'dimension': 500, 'mean_share': 0.03, 'most_labels': 1}
    """
    parameters = _imported(METHODS[method])().get_params()
    return {name: value for name, value in parameters.items() if name not in _ELSEWHERE}


def _imported(name: str) -> Any:
    return getattr(importlib.import_module(f"evenhand.density.{_PUBLIC[name]}"), name)


if not TYPE_CHECKING:  # type checkers see the imports above

    def __getattr__(name: str) -> Any:
        """Import public names on first use: scikit-learn takes a second."""
        if name in _PUBLIC:
            return _imported(name)
        raise AttributeError(f"module 'evenhand.density' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""The densities in words: classifiers that release class densities instead of gradient steps.

How they work is in ``evenhand.density``.
"""

from __future__ import annotations

from dataclasses import dataclass

from evenhand.methods.references import Reference
from evenhand.types import Guarantee

SMOOTHING = Reference(
    "anonymous2024enhancing",
    "Anonymous",
    2024,
    "Enhancing Privacy and Utility in Differentially Private Deep Learning through Instance-Level Smoothing",
    "Anonymous",
    "misc; howpublished=OpenReview, 97tbbvSJ4A; note=Paper under double-blind review",
)
HARDER = Reference(
    "harder2021dpmerf",
    "Harder et al.",
    2021,
    "DP-MERF: Differentially Private Mean Embeddings with Random Features for Practical Privacy-Preserving Data "
    "Generation",
    "Harder, Frederik and Adamczewski, Kamil and Park, Mijung",
    "misc; eprint=2002.11603; archiveprefix=arXiv",
)
DWORK = Reference(
    "dwork2014analyze",
    "Dwork et al.",
    2014,
    "Analyze Gauss: Optimal Bounds for Privacy-Preserving Principal Component Analysis",
    "Dwork, Cynthia and Talwar, Kunal and Thakurta, Abhradeep and Zhang, Li",
    "inproceedings; booktitle=ACM Symposium on Theory of Computing",
)


@dataclass(frozen=True)
class Density:
    """One density. ``releases`` names what is released, in order; a form that skips some skips the first ones."""

    name: str
    guarantee: Guarantee
    summary: str
    releases: tuple[str, ...]
    source: Reference

    @property
    def estimator(self) -> str:
        """Its class in ``evenhand.density``.

        Examples:
          >>> DENSITIES["moment_density"].estimator
          'MomentDensity'
        """
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def instead(self) -> str:
        """The command or call to use instead, for a user who asks for this density as a method of gradient steps."""
        if self.guarantee == "not established":
            return (
                f"No guarantee is established for {self.name!r}, so no command fits it: study it in Python with "
                f"evenhand.density.{self.estimator}(allow_unproven=True), or choose 'moment_density', which is private."
            )
        return (
            f"{self.name!r} is a density: it takes no gradient steps and trains no model of yours. Use `evenhand train "
            f"--method {self.name}`, or evenhand.density.{self.estimator} with fit(X, y) and plan(facts, promise)."
        )


DENSITIES = {
    density.name: density
    for density in (
        Density(
            "moment_density",
            "proved and tested",
            "a Gaussian per class, from noisy means and second moments",
            ("mean", "second moments"),
            DWORK,
        ),
        Density(
            "random_feature_density",
            "proved and tested",
            "a kernel density per class, from noisy sums of random features",
            ("mean", "second moments", "class sums"),
            HARDER,
        ),
        Density(
            "noisy_embedding_density",
            "proved and tested",
            "every record with noise for its own budget, and densities over those rows",
            ("row of every record",),
            SMOOTHING,
        ),
        Density(
            "published_smoothing",
            "not established",
            "the paper's smoothed densities as printed: for study, in Python only",
            ("training points with the paper's noise",),
            SMOOTHING,
        ),
    )
}
"""By the name that ``--method`` takes."""

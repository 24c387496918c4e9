"""The papers, the studies that judge them, and where each of their tables and figures is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper, in short what was seen of it, and the studies whose claims make its paragraph."""

    name: str
    title: str
    short: str
    studies: tuple[str, ...]


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper, its pages, and what differs or why there is none."""

    paper: str
    what: str
    pages: tuple[str, ...]
    note: str = ""


PAPERS = (
    Paper(
        "001",
        "INO-SGD (Tian et al. 2026)",
        "Ordering by loss helps strict owners where training is cut off before they are learned: small rates, "
        "few steps, "
        "budgets far apart. At a tuned rate it is not seen to help, and tends to cost a little.",
        (
            *("ino_map_digits", "ino_map_ctg", "ino_map_cifar", "ino_parts_digits", "ino_pareto_digits"),
            *("ctg_owners", "ctg_random", "ctg_records", "ctg_overlap", "ctg_noise", "ctg_ablation", "ctg_pareto"),
            *("mnist_owners", "cifar_owners", "names_owners"),
        ),
    ),
    Paper(
        "000",
        "SAD-DPSGD (Huang et al. 2024)",
        "Growing noise with a falling bound is about as good as constant noise: what a schedule gains at one "
        "epsilon or "
        "one rate is not seen at another.",
        ("sad_ham", "ham_sad", "ham_sad_studies"),
    ),
    Paper(
        "002",
        "Instance-level smoothing (2025)",
        "The published form has no finite epsilon. Sound densities, released once, stand beside a linear model "
        "of DP-SGD "
        "on scattering features, and serve a rare digit better than it as trained; the page of densities has all "
        "clauses "
        "with their intervals ([densities](densities.md)), and what a density gives away in "
        "[density_leak](density_leak.md).",
        (),
    ),
    Paper(
        "003",
        "DPSGD-F (Xu et al. 2021)",
        "A clip bound per group gains a lot at the paper's own, small learning rate, as any larger bound does; "
        "with rates "
        "tuned alike little of it is left. Memory is free, and matters where a group has few records in a step.",
        ("sexes_adult", "sexes_dutch", "adult_paper", "dutch_paper", "adult", "dutch", "adult_sweep", "digits"),
    ),
    Paper(
        "004",
        "Global-Adapt-V2 (Chilukoti et al. 2025)",
        "The claimed accuracies stand at an epsilon that was composed once per epoch. At true epsilon its "
        "falling noise "
        "and threshold are not seen to serve the rare digit better than DP-SGD with a tuned rate.",
        ("adapt_mnist8", "mnist8_v2", "mnist8_optimizers", "mnist8", "mnist8_scattering"),
    ),
)
CNN = "Linear on fixed features; with a network of its own only as the older pages have it, with fewer replicas."
ITEMS = (
    Item(
        "001",
        "map: rate x tail x ratio of budgets, with conditions 1 and 2",
        ("ino_map_digits", "ino_map_ctg", "ino_map_cifar"),
    ),
    Item(
        "001",
        "Fig. 6, 13: per-owner change against budget",
        ("ino_map_digits", "ctg_owners", "ctg_random", "cifar_owners"),
    ),
    Item("001", "Fig. 12: worst owner over training; Fig. 14: classes within an owner", ("owner_curves",)),
    Item(
        "001",
        "Fig. 11: overlapping owners, noisy labels, similar budgets per record",
        ("ctg_overlap", "ctg_noise", "ctg_records"),
        "CIFAR-100 is not among the data at hand; cardiotocography in its place.",
    ),
    Item("001", "ablations: a and b, tail, steps, order (App. D.4)", ("ino_parts_digits", "ctg_ablation")),
    Item("001", "Pareto superiority", ("ino_pareto_digits", "ctg_pareto")),
    Item("001", "table 3: random undersampling", ("ino_pareto_digits", "ino_map_digits")),
    Item(
        "001",
        "Fig. 21: other clipping rules below the order",
        ("ino_parts_digits",),
        "Over Auto-S. A bound that follows noisy answers is refused below budgets per owner (what a budget buys "
        "would follow it).",
    ),
    Item(
        "001",
        "IDP on MNIST with the published code's settings",
        ("idp_mnist", "idp_mnist_code"),
        "Three trainings a method, about 5 minutes each on a free core.",
    ),
    Item(
        "001",
        "LiRA per owner",
        (),
        "Not run: it needs hundreds of trainings per owner. `evenhand audit` has canaries and one-run audits.",
    ),
    Item("001", "Pneumonia (PN), CIFAR-100 (CH, CF)", (), "No files at hand."),
    Item(
        "000",
        "table of HAM10000, epsilon 3, 8, 16",
        ("sad_ham", "ham_sad"),
        "Linear on EfficientNet-Lite0 features in place of a trained ResNet-50.",
    ),
    Item("000", "Fig. 3, 4, 5: mean, variance, first sigma", ("sad_noise",)),
    Item("000", "Fig. 6, 7 and table 1: beta, gamma, n", ("ham_sad_studies",), "Five seeds."),
    Item("000", "Fig. 1, 9: minority against majority over training", ("sad_ham",)),
    Item("000", "goal worst beside them", ("serving_ham",)),
    Item(
        "002",
        "table 1: CIFAR-10",
        ("serving_cifar", "densities"),
        "Linear on all of CIFAR-10 on EfficientNet-Lite0 features; densities on scattering features of 10,000 "
        "pictures.",
    ),
    Item("002", "Fig. 1: k-NN distances by class", ("knn_distances",), "On HAM10000 on backbone features."),
    Item("002", "Fig. 3: class disparity", ("densities", "serving_cifar_rare", "serving_cifar_rarer")),
    Item(
        "002",
        "AUC per finding on CheXpert",
        (),
        "No pictures at hand; no public multi-label table among the data at hand either.",
    ),
    Item(
        "003",
        "table 1 and Fig. 1: accuracy by group, four methods",
        ("sexes_adult", "sexes_dutch", "mnist8", "serving_mnist8_projected"),
    ),
    Item(
        "003",
        "table 2: loss and gradient norm by group",
        ("sexes_adult", "sexes_dutch", "group_curves", "adapt_mnist8"),
    ),
    Item(
        "003",
        "table 3: uniform bounds 1 to 5",
        ("sexes_adult", "sexes_dutch", "adult_sweep"),
        "On Adult and Dutch; MNIST with its CNN was not run.",
    ),
    Item("003", "Fig. 2: C_k over epochs", ("group_curves",), "On Adult; with 5 seeds."),
    Item("003", "Fig. 3: over epochs and noise", ("epsilon",), "Epsilon only; accuracy at one number of epochs."),
    Item(
        "003",
        "MNIST, rate .01, batch 256, 60 epochs, its CNN",
        ("mnist8", "mnist8_f_paper"),
        "The first has three seeds of a tanh CNN with tuned rates; the second takes about 70 minutes on one core.",
    ),
    Item("004", "tables 4 to 6: MNIST, CIFAR-10, CIFAR-100", ("mnist8_v2", "serving_cifar"), CNN),
    Item("004", "tables 7 to 12: unbalanced MNIST, accuracy, AUC, gap of 2 and 8", ("adapt_mnist8", "mnist8"), CNN),
    Item("004", "tables 13 to 15: kinds of decay", ("mnist8_v2",), "Constant and step decay."),
    Item("004", "tables 16 and 17: step size K and rate R", ("adapt_mnist8", "mnist8_v2"), "Two pairs of K and R."),
    Item("004", "tables 18 and 19: rounds and batch", (), "Not run."),
    Item("004", "tables 20 and 21: optimizers and schedulers", ("mnist8_optimizers",), "Five seeds."),
    Item(
        "004",
        "Fig. 1, 2: thresholds and gradient norms over training",
        (),
        "The threshold is z_0 R^floor(e/K), a constant of the plan, and is drawn in the report of every run; "
        "mean norms are not private and were not drawn.",
    ),
    Item("004", "Thinwall", (), "No files at hand."),
)

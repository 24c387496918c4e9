"""The papers, the studies that judge them, and where each of their tables and figures is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paper:
    """A paper, the studies whose claims are judged, and in short what was seen.

    ``short`` has words in braces for intervals; ``cited`` says of which study and claim each of them is.
    """

    name: str
    title: str
    short: str
    studies: tuple[str, ...]
    cited: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper, its pages, and what differs or why there is none."""

    paper: str
    what: str
    pages: tuple[str, ...]
    note: str = ""


_WIDE, _CTG, _E3 = "(budgets 0.5 to 5)", "(budgets 1 to 4)", "(epsilon 3)"
_SLOW = "At the slow rate 1, "
_PAPERS_RATE = "At the paper's rate, DPSGD-F"
_RARE = "MNIST with class 8 cut to 500 records"
PAPERS = (
    Paper(
        "001",
        "INO-SGD (Tian et al. 2026)",
        "Ordering by loss helps strict owners where training is cut off before they are learned: small rates, few "
        "steps, budgets far apart. On the digits at rate 1 it gives the strictest of ten owners {slow} points over "
        "IDP-SGD; the order does it, since a random one is {random} behind. At tuned rates the strictest owner is not "
        "seen to gain: {tuned} on the digits, {tuned_ctg} on cardiotocography, {tuned_cifar} on CIFAR-10 with "
        "owners dealt anew. With ten owners fixed, on one split there, the owner that is worst served, which is not "
        "the strictest, gains {worst_cifar}. Where no arm learns the strict owner, as at the slow rate on "
        "cardiotocography, ordering changes nothing: {flat}. The "
        "worst owner is served far better at the slow rate where everybody gets the strictest promise: ordering is "
        "{strictest} from it; at tuned rates this is not decided: {strictest_tuned}. "
        "To membership inference stricter owners leak less, with ordering or not: "
        "[lira_owners](lira_owners.md). With the published code's settings IDP-SGD gains {idp} (Sample) and "
        "{idp_scale} (Scale) over DP-SGD, untuned, as published; by the paper's text [next to nothing](idp_mnist.md).",
        (
            *("ino_map_digits", "ino_map_ctg", "ino_map_cifar", "ino_parts_digits", "ino_pareto_digits"),
            *("ctg_owners", "ctg_random", "ctg_records", "ctg_overlap", "ctg_noise", "ctg_ablation", "ctg_pareto"),
            *("mnist_owners", "cifar_owners", "names_owners", "idp_mnist_code"),
        ),
        {
            **{
                word: (
                    "idp_mnist_code",
                    f"At rate 0.6 `{method}` is more accurate than DP-SGD at the strictest budget (budgets 1 to 3)",
                )
                for word, method in (("idp", "idp_sample"), ("idp_scale", "idp_scale"))
            },
            "slow": (
                "ino_map_digits",
                f"{_SLOW}ordering (Scale) raises the strictest owner by more than 5 points {_WIDE}",
            ),
            "random": (
                "ino_map_digits",
                f"{_SLOW}the order by loss (Scale) raises the strictest owner above a random order {_WIDE}",
            ),
            "tuned": (
                "ino_map_digits",
                f"With each at its own rate, ordering (Scale) raises the strictest owner {_WIDE}",
            ),
            "tuned_ctg": (
                "ino_map_ctg",
                f"With each at its own rate, ordering (Scale) raises the strictest owner {_CTG}",
            ),
            "tuned_cifar": (
                "ino_map_cifar",
                "With each at its own rate, ordering (Scale) raises the strictest owner (budgets 1 to 10)",
            ),
            "worst_cifar": (
                "cifar_owners",
                "INO (Scale) raises the recall of the worst owner over IDP-SGD (Scale) (budgets 2 to 11)",
            ),
            "flat": (
                "ino_map_ctg",
                f"{_SLOW}ordering (Scale) raises the strictest owner by more than 5 points {_CTG}",
            ),
            "strictest": (
                "ino_pareto_digits",
                f"At rate 1, tail 1 serves the worst owner better than the strictest promise for all {_WIDE}",
            ),
            "strictest_tuned": (
                "ino_pareto_digits",
                "Each at its own rate, tail 1 serves the worst owner better than the strictest promise for all "
                f"{_WIDE}",
            ),
        },
    ),
    Paper(
        "000",
        "SAD-DPSGD (Huang and Xie 2025)",
        "Growing noise with a falling bound is about as good as constant noise. On HAM10000 with the same rates to "
        "choose from, 20 replicas: {plain_3} points of accuracy from DP-SGD at epsilon 3, {plain_8} at 8, {plain_16} "
        "at 16; {back_3}, {back_8} and {back_16} from the same schedule reversed. The mean over diagnoses gains at 16, "
        "{mean_16}, which is not decided at 3, {mean_3}, and 8, {mean_8}. At epsilon 8 it is more accurate than "
        "Auto-DPSGD-S, our sound substitute, in an older study of five seeds: {auto_8}. The paper's beta, gamma and "
        "number of phases are not seen to be better than others: {beta} for beta, {phases} for three phases against "
        "two.",
        ("sad_ham", "ham_sad", "ham_sad_studies"),
        {
            **{f"plain_{at}": ("sad_ham", f"SAD is more accurate than DP-SGD (epsilon {at})") for at in (3, 8, 16)},
            **{
                f"back_{at}": ("sad_ham", f"SAD is more accurate than the same schedule reversed (epsilon {at})")
                for at in (3, 8, 16)
            },
            **{
                f"mean_{at}": (
                    "sad_ham",
                    f"SAD serves the diagnoses better in the mean than DP-SGD (epsilon {at})",
                )
                for at in (3, 8, 16)
            },
            "auto_8": ("ham_sad", "SAD is more accurate than Auto-DPSGD-S (our sound substitute) (epsilon 8)"),
            "beta": ("ham_sad_studies", f"beta = 0.8 is more accurate than 0.6 {_E3}"),
            "phases": ("ham_sad_studies", f"Three phases are more accurate than two {_E3}"),
        },
    ),
    Paper(
        "002",
        "Instance-level smoothing (2025)",
        "The published form has no finite epsilon. Sound densities, released once, stand beside a linear model of "
        "DP-SGD on scattering features: on MNIST their accuracy is {whole} points from it at epsilon 3. They serve a "
        "rare digit better than it as trained: {rare_1} at 1, {rare_3} at 3, {rare_8} at 8. Where records are few and "
        "epsilon is large they fall behind in accuracy: {cifar} on 10,000 pictures of CIFAR-10, {ham} on HAM10000, "
        "both at 8. What a density gives away: [density_leak](density_leak.md).",
        ("densities",),
        {
            "whole": ("densities", "MNIST, epsilon 3, accuracy"),
            **{f"rare_{at}": ("densities", f"{_RARE}, epsilon {at}, worst class") for at in (1, 3, 8)},
            "cifar": ("densities", "CIFAR-10, 10,000 records, epsilon 8, accuracy"),
            "ham": ("densities", "HAM10000, epsilon 8, accuracy"),
        },
    ),
    Paper(
        "003",
        "DPSGD-F (Xu et al. 2021)",
        "At the paper's own, small learning rate a clip bound per group gains a lot on Adult: {slow} points of "
        "accuracy, and {sexes} points of the difference between the sexes in accuracy lost. So does one larger bound "
        "for everybody, from which DPSGD-F is {larger} away, also with more noise, {noisy}, and less, {quiet}. On "
        "Dutch "
        "the gain is {dutch}. With rates tuned alike little of it is left: {tuned} of "
        "accuracy, and {tuned_sexes} between the sexes. Naive reweighting is like DP-SGD at the paper's rate, as "
        "the paper says: DP-SGD is {naive} above it. On unbalanced MNIST with the paper's network and rate "
        "(three seeds) training ends before DP-SGD has learned the rare digit; DPSGD-F is {cnn} points from it there, "
        "and {cnn_larger} from DP-SGD with bound 5. Memory of the noisy counts costs no privacy; on Adult it is not "
        "seen to matter, {memory}, and where a group has few records in a step it helps on the held-out records of "
        "[serving_mnist8_projected](serving_mnist8_projected.md).",
        (
            *("sexes_adult", "sexes_dutch", "sexes_adult_noise", "adult_paper", "dutch_paper", "adult", "dutch"),
            *("adult_sweep", "digits", "mnist8_f_paper"),
        ),
        {
            "cnn": ("mnist8_f_paper", "DPSGD-F serves class 8 better than DP-SGD (epsilon 6.55)"),
            "cnn_larger": ("mnist8_f_paper", "DPSGD-F serves class 8 better than DP-SGD with bound 5 (epsilon 6.55)"),
            "slow": (
                "sexes_adult",
                f"{_PAPERS_RATE} without memory (the paper's) loses less accuracy than DP-SGD {_E3}",
            ),
            "sexes": (
                "sexes_adult",
                f"{_PAPERS_RATE} without memory has a smaller difference between the sexes in accuracy lost, by at "
                f"least 1 point {_E3}",
            ),
            "larger": ("sexes_adult", f"{_PAPERS_RATE} is more accurate than DP-SGD with bound 5 {_E3}"),
            "noisy": (
                "sexes_adult_noise",
                "At the paper's rate, DPSGD-F loses less accuracy than DP-SGD, bound 5 (epsilon 0.5)",
            ),
            "quiet": (
                "sexes_adult_noise",
                "At the paper's rate, DPSGD-F loses less accuracy than DP-SGD, bound 5 (epsilon 8)",
            ),
            "dutch": (
                "sexes_dutch",
                f"{_PAPERS_RATE} without memory (the paper's) loses less accuracy than DP-SGD {_E3}",
            ),
            "tuned": ("sexes_adult", f"With each at its own rate, DPSGD-F is more accurate than DP-SGD {_E3}"),
            "tuned_sexes": (
                "sexes_adult",
                "With each at its own rate, DPSGD-F has a smaller difference between the sexes in accuracy lost, by "
                f"at least 0.5 points {_E3}",
            ),
            "naive": (
                "sexes_adult",
                f"At the paper's rate, naive reweighting gains over DP-SGD by less than 0.5 points {_E3}",
            ),
            "memory": (
                "sexes_adult",
                f"At the paper's rate, memory changes DPSGD-F's accuracy by more than 0.1 points for the better {_E3}",
            ),
        },
    ),
    Paper(
        "004",
        "Global-Adapt-V2 (Chilukoti et al. 2025)",
        "The claimed accuracies stand at an epsilon that was composed once per epoch. With 20 replicas on unbalanced "
        "MNIST V2-S is {v2_1} points of accuracy from DP-SGD at true epsilon 1, {v2_3} at 3 and {v2_10} at 10, and its "
        "gap between digits 2 and 8 is larger at 1: {gap_1}. Noise that falls by steps is {steps} from constant noise "
        "on MNIST over 100 rounds at epsilon 1; a larger K, {step_size}, a larger R, {drop_rate}, and fewer rounds, "
        "{rounds}, are better, as the paper says. In older studies at epsilon 3 falling noise changes nothing that is "
        "seen, {falling}, and the threshold is not seen to serve the rare digit better than DP-SGD: {rare}; the older "
        "Global-Adapt serves it worse: {older}. It needs no Adam, {adam}, and no cosine rate, {cosine}. What serves "
        "the rare digit is naive reweighting: {naive} on scattering features; with a network, on three seeds, that is "
        "not decided: {naive_cnn}.",
        ("adapt_mnist8", "adapt_settings", "mnist8_v2", "mnist8_optimizers", "mnist8", "mnist8_scattering"),
        {
            **{
                name: ("adapt_settings", f"{claim} (epsilon 1)")
                for name, claim in (
                    ("steps", "Noise that falls by steps is better than constant noise"),
                    ("step_size", "K = 50 is more accurate than K = 10"),
                    ("drop_rate", "R = 0.9 is more accurate than R = 0.5"),
                    ("rounds", "10 rounds are better than 100"),
                )
            },
            **{f"v2_{at}": ("adapt_mnist8", f"V2-S is more accurate than DP-SGD (epsilon {at})") for at in (1, 3, 10)},
            "gap_1": ("adapt_mnist8", "V2-S has a smaller gap |pi_2 - pi_8| than DP-SGD (epsilon 1)"),
            "falling": ("mnist8_v2", f"V2 with falling noise is more accurate than V2 with constant noise {_E3}"),
            "rare": ("mnist8_v2", f"V2 (K = 10, R = 0.5, constant noise) serves class 8 better than DP-SGD {_E3}"),
            "older": (
                "mnist8_v2",
                f"Global-Adapt serves class 8 better than DP-SGD with a learning rate tuned alike {_E3}",
            ),
            "adam": ("mnist8_optimizers", f"V2 is more accurate with Adam than with SGD {_E3}"),
            "cosine": ("mnist8_optimizers", f"V2 is more accurate with a cosine rate than with a constant one {_E3}"),
            "naive": ("mnist8_scattering", f"Naive reweighting serves class 8 better than DP-SGD {_E3}"),
            "naive_cnn": ("mnist8", f"Naive reweighting serves class 8 better than DP-SGD {_E3}"),
        },
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
        "Five trainings a method at the paper's rate, about 6 minutes each on a free core.",
    ),
    Item(
        "001",
        "Fig. 22: LiRA per owner",
        ("lira_owners",),
        "Digits with three owners and a small network, five deals of 256 models.",
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
        ("findings",),
        "No pictures at hand; five of CelebA's attributes in their place, on disjoint samples of records.",
    ),
    Item(
        "003",
        "table 1 and Fig. 1: accuracy by group, four methods",
        ("sexes_adult", "sexes_dutch", "mnist8_f_paper", "mnist8", "serving_mnist8_projected"),
    ),
    Item(
        "003",
        "table 2: loss and gradient norm by group",
        ("sexes_adult", "sexes_dutch", "group_curves", "adapt_mnist8"),
    ),
    Item(
        "003",
        "table 3: uniform bounds 1 to 5",
        ("sexes_adult", "sexes_dutch", "adult_sweep", "mnist8_f_paper"),
        "On Adult and Dutch; on MNIST with its CNN the bounds 1 and 5.",
    ),
    Item("003", "Fig. 2: C_k over epochs", ("group_curves",), "On Adult; with 5 seeds."),
    Item(
        "003",
        "Fig. 3: over epochs and noise",
        ("sexes_adult_noise", "epsilon"),
        "Accuracy at four noises and over the epochs of one training; epsilon by both.",
    ),
    Item(
        "003",
        "MNIST, rate .01, batch 256, 60 epochs, its CNN",
        ("mnist8_f_paper", "mnist8"),
        "The first has three seeds where the rule asks five; the second, with tuned rates, a tanh CNN.",
    ),
    Item("004", "tables 4 to 6: MNIST, CIFAR-10, CIFAR-100", ("mnist8_v2", "serving_cifar"), CNN),
    Item("004", "tables 7 to 12: unbalanced MNIST, accuracy, AUC, gap of 2 and 8", ("adapt_mnist8", "mnist8"), CNN),
    Item(
        "004",
        "tables 13 to 15: kinds of decay",
        ("adapt_settings", "mnist8_v2"),
        "On MNIST at epsilon 1; unbalanced with constant and step decay. CIFAR-100 is not at hand.",
    ),
    Item("004", "tables 16 and 17: step size K and rate R", ("adapt_settings", "adapt_mnist8")),
    Item(
        "004",
        "tables 18 and 19: rounds and batch",
        ("adapt_settings",),
        "Batches of 256 to 16,384 over 30 rounds in place of 16 to 256 over 100.",
    ),
    Item("004", "tables 20 and 21: optimizers and schedulers", ("mnist8_optimizers",), "Five seeds."),
    Item(
        "004",
        "Fig. 1, 2: thresholds and gradient norms over training",
        ("adapt_curves",),
        "A linear model on pixels, batches of 256, 30 rounds.",
    ),
    Item("004", "Thinwall", (), "No files at hand."),
)

"""The studies of ordering by loss (001, INO-SGD) at matched rates."""

from __future__ import annotations

from dataclasses import replace

from matched_study import Arm, Claim, Promise, Study

BOUND = (("bound", 0.1),)
FULL = (*BOUND, ("length", 1.0))
ORDER = (
    Arm("strictest for all", "dpsgd", BOUND),
    Arm("IDP (Scale)", "idp_scale", BOUND),
    Arm("INO (Scale), tail 0.5", "ino_scale", BOUND),
    Arm("INO (Scale), tail 1", "ino_scale", FULL),
    Arm("INO (Scale), random order", "ino_scale", (*FULL, ("order", "random"))),
    Arm("IDP (Sample)", "idp_sample", BOUND),
    Arm("INO (Sample), tail 0.5", "ino_sample", BOUND),
    Arm("INO (Sample), tail 1", "ino_sample", FULL),
    Arm("IDP (Sample), budgets lowered by half", "idp_sample", BOUND, lowered=0.5),
    Arm("IDP (Sample), half of the laxer owners' records dropped", "idp_sample", BOUND, dropped=0.5),
)
RATIOS = (
    Promise("budgets 0.5 to 2", 0.5, 4.0),
    Promise("budgets 0.5 to 5", 0.5, 10.0),
    Promise("budgets 0.5 to 15", 0.5, 30.0),
)


def ordering_claims(slow: float, fast: float, promise: str) -> tuple[Claim, ...]:
    """Return what is claimed of ordering: gains at a slow rate, at a fast one, and with each arm at its own."""
    left, right = "INO (Sample), tail 1", "IDP (Sample)"
    scale, usual = "INO (Scale), tail 1", "IDP (Scale)"
    return (
        Claim(
            f"At the slow rate {slow:g}, ordering (Sample) raises the strictest owner by more than 5 points",
            left,
            right,
            "first",
            promise,
            slow,
            5.0,
        ),
        Claim(
            f"At the slow rate {slow:g}, ordering (Scale) raises the strictest owner by more than 5 points",
            scale,
            usual,
            "first",
            promise,
            slow,
            5.0,
        ),
        Claim(
            f"At the fast rate {fast:g}, ordering (Sample) raises the strictest owner by more than 1 point",
            left,
            right,
            "first",
            promise,
            fast,
            1.0,
        ),
        Claim("With each at its own rate, ordering (Sample) raises the strictest owner", left, right, "first", promise),
        Claim("With each at its own rate, ordering (Scale) raises the strictest owner", scale, usual, "first", promise),
        Claim(
            "With each at its own rate, ordering (Sample) costs less than 1 point of overall accuracy",
            left,
            right,
            "overall",
            promise,
            None,
            -1.0,
        ),
        Claim(
            "With each at its own rate, ordering (Sample) serves the worst owner better than budgets lowered by half",
            left,
            "IDP (Sample), budgets lowered by half",
            "worst",
            promise,
        ),
        Claim(
            f"At the slow rate {slow:g}, the order by loss (Scale) raises the strictest owner above a random order",
            scale,
            "INO (Scale), random order",
            "first",
            promise,
            slow,
        ),
    )


OURS = (
    "Budgets, tails and training settings of the paper are lost in our copy of it (its formulas and numbers were not "
    "extracted): those here are ours.",
)
MAP = Study(
    name="ino_map_digits",
    title="When does ordering pay? Digits, ten owners",
    question=(
        "At which learning rates, tails and ratios of budgets does INO-SGD serve the strictest owner better than "
        "IDP-SGD?"
    ),
    paper="Tian et al. 2026, INO-SGD, setting CR (owners hold a random class in each run)",
    source="digits",
    arms=ORDER,
    promises=RATIOS,
    rates=(0.3, 1.0, 3.0, 10.0, 30.0),
    batch=128,
    epochs=15,
    claims=ordering_claims(1.0, 30.0, "budgets 0.5 to 5"),
    choices=(
        *OURS,
        "Every seed deals the ten classes to the ten owners anew, so that no class is always the strictest; "
        "classes are "
        "cut to the size of the smallest, so that budgets alone differ.",
        "Clip bound 0.1, so that nearly every gradient is clipped and the rate alone sets the length of a step.",
    ),
    delta=1e-4,
    replicas=60,
    owned=True,
    dealt=True,
    even=True,
    watch=(0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    kind="images",
    guides=("strictest for all", "IDP (Scale)", "INO (Scale), tail 0.5", "IDP (Sample)", "INO (Sample), tail 0.5"),
    answer=(
        "Ordering pays for the strictest owner, and overall, where the rate is so small that training ends before "
        "that owner is learned, and more with a longer tail; where it is smaller still, so that nobody strict is "
        "learned at all, only the overall accuracy gains. At the rate that each arm would choose it gains nothing "
        "and tends to cost a little, and lower budgets for the laxer owners serve the worst owner better in the "
        "mean. The order does the work: the same tail over a random order is far worse. Condition 1 fails at the "
        "start for every budget, and at the slow rate it goes on failing for longer the wider the budgets are "
        "apart; at tuned rates it is met within a twentieth of the steps."
    ),
)
MAPS = (
    MAP,
    replace(
        MAP,
        name="ino_map_ctg",
        kind="table",
        answer=(
            "At no rate is ordering seen to help the pathologic records here. At the slow rates no arm answers "
            "anything but the largest class; where that owner is learned at all, ordering gains nothing in the "
            "mean. The order by loss does far less harm than a random one, and lower budgets for the laxer owners "
            "serve the worst owner better at most rates, in the mean."
        ),
        title="When does ordering pay? Cardiotocography",
        paper="Tian et al. 2026, INO-SGD, setting CA (owners are diagnoses), with a linear model",
        source="ctg",
        dealt=False,
        even=False,
        first=2,
        order=("pathologic", "suspect", "normal"),
        epochs=30,
        replicas=30,
        promises=(Promise("budgets 1 to 4", 1.0, 4.0), Promise("budgets 0.5 to 8", 0.5, 16.0)),
        claims=ordering_claims(1.0, 30.0, "budgets 1 to 4"),
        choices=(
            *OURS,
            "Owners are the three diagnoses; the strictest is the pathologic one, as in the paper.",
            MAP.choices[2],
        ),
    ),
    replace(
        MAP,
        name="ino_map_cifar",
        answer=(
            "On backbone features ordering is seen to help the strictest owner at the smallest rate of the grid only, "
            "which no arm would choose. At all others it is level or costs a little, and lower budgets for the laxer "
            "owners serve the worst owner better. What the order does is less harm than a random one. Together, "
            "conditions 1 and 2 fail at the start; after a twentieth of the steps they are met nearly always."
        ),
        title="When does ordering pay? CIFAR-10 on backbone features, ten owners",
        source="cifar10-subset",
        epochs=20,
        batch=512,
        replicas=20,
        trials=3,
        promises=(Promise("budgets 1 to 10", 1.0, 10.0),),
        rates=(0.3, 1.0, 3.0, 10.0, 30.0),
        claims=ordering_claims(1.0, 30.0, "budgets 1 to 10"),
        choices=(
            *MAP.choices,
            "12,000 pictures (10,000 and 2,000 of the official parts, split anew), EfficientNet-Lite0 features.",
        ),
    ),
)
PARTS = replace(
    MAP,
    name="ino_parts_digits",
    guides=(),
    answer=(
        "The order by loss does the work: under a random or a reversed order the same tail harms the strictest "
        "owner. A longer tail gives that owner more at a slow rate and costs a little at a tuned one, in the "
        "mean; the shape of the tail and the rule below the order change less."
    ),
    title="Which part of INO-SGD does the work? Digits, ten owners",
    question=(
        "Does the gain at slow rates come from the order by loss, and what do tail, shape and the rule below it change?"
    ),
    paper="Tian et al. 2026, INO-SGD, ablations of a and b, tail, steps, order, and INO over other rules (App. D.4)",
    promises=(Promise("budgets 0.5 to 5", 0.5, 10.0),),
    rates=(1.0, 3.0, 10.0),
    replicas=40,
    watch=(),
    arms=(
        Arm("IDP (Scale)", "idp_scale", BOUND),
        *(Arm(f"INO, tail {length:g}", "ino_scale", (*BOUND, ("length", length))) for length in (0.1, 0.25, 0.5, 1.0)),
        Arm("INO, tail 1, a = 2, b = 1", "ino_scale", (*FULL, ("a", 2.0))),
        Arm("INO, tail 1, a = 1, b = 2", "ino_scale", (*FULL, ("b", 2.0))),
        Arm("INO, tail 1, a = b = 4", "ino_scale", (*FULL, ("a", 4.0), ("b", 4.0))),
        Arm("INO, tail 1, four steps", "ino_scale", (*FULL, ("tail", "step"))),
        Arm("INO, tail 1, random order", "ino_scale", (*FULL, ("order", "random"))),
        Arm("INO, tail 1, ascending loss", "ino_scale", (*FULL, ("order", "ascending"))),
        Arm("INO, tail 1, owner then loss", "ino_scale", (*FULL, ("order", "owner"))),
        Arm("IDP over Auto-S", "idp_scale", (*BOUND, ("over", "auto_s"))),
        Arm("INO, tail 1, over Auto-S", "ino_scale", (*FULL, ("over", "auto_s"))),
    ),
    claims=tuple(
        Claim(text, left, right, "first", "budgets 0.5 to 5", rate)
        for text, left, right, rate in (
            ("At rate 1, tail 1 raises the strictest owner over IDP", "INO, tail 1", "IDP (Scale)", 1.0),
            (
                "At rate 1, a longer tail raises the strictest owner (1 against 0.5)",
                "INO, tail 1",
                "INO, tail 0.5",
                1.0,
            ),
            (
                "At rate 1, a longer tail raises the strictest owner (0.5 against 0.1)",
                "INO, tail 0.5",
                "INO, tail 0.1",
                1.0,
            ),
            (
                "At rate 1, the order by loss is better than a random one",
                "INO, tail 1",
                "INO, tail 1, random order",
                1.0,
            ),
            (
                "At rate 1, the order by loss is better than the reverse",
                "INO, tail 1",
                "INO, tail 1, ascending loss",
                1.0,
            ),
            (
                "At rate 1, owner then loss is better than loss alone",
                "INO, tail 1, owner then loss",
                "INO, tail 1",
                1.0,
            ),
            (
                "At rate 1, INO over Auto-S is better than IDP over Auto-S",
                "INO, tail 1, over Auto-S",
                "IDP over Auto-S",
                1.0,
            ),
            ("Each at its own rate, tail 1 raises the strictest owner over IDP", "INO, tail 1", "IDP (Scale)", None),
            (
                "Each at its own rate, owner then loss raises it over IDP",
                "INO, tail 1, owner then loss",
                "IDP (Scale)",
                None,
            ),
        )
    ),
)
FRONTIER = replace(
    MAP,
    name="ino_pareto_digits",
    guides=(),
    answer=(
        "At a slow rate a long tail is more accurate overall than lower budgets are, but whoever wants to serve "
        "the strictest and the worst owner is better served by the strictest promise for everybody. At tuned "
        "rates no tail is seen to beat lower budgets, and dropping records costs more than it gives."
    ),
    title="What balance costs: tails against lower budgets. Digits, ten owners",
    question=(
        "For the same overall accuracy, does a longer tail serve the worst owner better than lower budgets for laxer "
        "owners?"
    ),
    paper="Tian et al. 2026, INO-SGD, Pareto superiority (App. D.4.3) and dropped records (table 3)",
    promises=(Promise("budgets 0.5 to 5", 0.5, 10.0),),
    rates=(1.0, 3.0, 10.0),
    replicas=40,
    watch=(),
    arms=(
        Arm("IDP (Sample)", "idp_sample", BOUND),
        *(
            Arm(f"INO, tail {length:g}", "ino_sample", (*BOUND, ("length", length)))
            for length in (0.25, 0.5, 0.75, 1.0)
        ),
        *(
            Arm(f"IDP, budgets lowered by {100 * share:g} %", "idp_sample", BOUND, lowered=share)
            for share in (0.25, 0.5, 0.75, 1.0)
        ),
        *(
            Arm(f"IDP, {100 * share:g} % of the laxer owners' records dropped", "idp_sample", BOUND, dropped=share)
            for share in (0.25, 0.5)
        ),
    ),
    claims=tuple(
        Claim(f"{at}, {text}", left, right, measure, "budgets 0.5 to 5", rate, least)
        for at, rate in (("At rate 1", 1.0), ("Each at its own rate", None))
        for text, left, right, measure, least in (
            (
                "tail 1 serves the worst owner better than budgets lowered by half",
                "INO, tail 1",
                "IDP, budgets lowered by 50 %",
                "worst",
                0.0,
            ),
            (
                "tail 1 is more accurate overall than budgets lowered by half",
                "INO, tail 1",
                "IDP, budgets lowered by 50 %",
                "overall",
                0.0,
            ),
            (
                "tail 1 serves the worst owner better than a quarter of the laxer owners' records dropped",
                "INO, tail 1",
                "IDP, 25 % of the laxer owners' records dropped",
                "worst",
                0.0,
            ),
            (
                "tail 1 serves the worst owner better than the strictest promise for all",
                "INO, tail 1",
                "IDP, budgets lowered by 100 %",
                "worst",
                0.0,
            ),
        )
    ),
)

"""The study of Global-Adapt-V2's settings (004, tables 13 and 16 to 19) at matched rates."""

from __future__ import annotations

from matched_study import Arm, Claim, Promise, Study

BOUND = (("bound", 0.1),)
EPSILON = "epsilon 1"
V2_S = "V2-S"
ROUNDS, DECAYS = (10, 30, 50, 80), ("linear", "time")
STEP_SIZES, DROP_RATES = (5, 20, 25, 50), (0.1, 0.25, 0.75, 0.9)
BATCHES = (256, 1024, 16384)


def arms() -> tuple[Arm, ...]:
    """Return V2-S as published, then with one thing changed at a time, beside DP-SGD."""
    step = "global_adapt_v2_s"
    return (
        Arm("SGD, not private", "sgd", private=False, epochs=10),
        Arm("DP-SGD", "dpsgd", BOUND),
        Arm("DP-SGD, 10 rounds", "dpsgd", BOUND, epochs=10),
        Arm(V2_S, step, BOUND),
        Arm("V2, constant noise", "global_adapt_v2", BOUND),
        *(Arm(f"V2, {decay} decay", "global_adapt_v2", (*BOUND, ("decay", decay))) for decay in DECAYS),
        *(Arm(f"{V2_S}, K {every}", step, (*BOUND, ("every", every))) for every in STEP_SIZES),
        *(Arm(f"{V2_S}, R {rate:g}", step, (*BOUND, ("rate", rate))) for rate in DROP_RATES),
        *(Arm(f"{V2_S}, {rounds} rounds", step, BOUND, epochs=rounds) for rounds in ROUNDS),
        *(Arm(f"{V2_S}, 30 rounds of {batch:,}", step, BOUND, epochs=30, batch=batch) for batch in BATCHES),
    )


SETTINGS = Study(
    name="adapt_settings",
    answer=(
        "None of these choices is seen to make V2-S better than constant noise. Over 100 rounds with K = 10 and R "
        "= 0.5, as published, noise that falls by steps costs about two points against noise that is constant, "
        "falls linearly or with time, and against DP-SGD with one bound: for the same epsilon it begins at ten "
        "times as much noise, and what it has less at the end does not make up for that. A larger K and R, which "
        "bring it closer to constant noise, are better, as the paper says; that R = 0.1 learns nothing holds too. "
        "Fewer rounds are better for V2-S, whose noise then falls less often, while DP-SGD is better after 100 "
        "than after 10. Between batches of 256, 1,024 and 4,096 no difference is seen. K = 5, R = 0.1, R = 0.25 "
        "and SGD took the smallest rate of the grid; the first three fail at every rate."
    ),
    title="Global-Adapt-V2-S on MNIST: decay, K and R, rounds, batch",
    question=(
        "Which kind of decay, which K and R, how many rounds and which batch serve V2-S best once epsilon is counted "
        "per step and every choice gets its own rate?"
    ),
    paper="Chilukoti et al. 2025, DP-SGD-Global-Adapt-V2-S, tables 13 and 16 to 19 (MNIST at its epsilon 1)",
    source="mnist",
    arms=arms(),
    promises=(Promise(EPSILON, 1.0),),
    rates=(2.0, 8.0, 32.0),
    batch=4096,
    epochs=100,
    claims=tuple(
        Claim(text, left, right, "overall", EPSILON, least=least)
        for text, left, right, least in (
            ("V2-S is more accurate than DP-SGD after 100 rounds", V2_S, "DP-SGD", 0.0),
            ("V2-S is more accurate than DP-SGD after 10 rounds", f"{V2_S}, 10 rounds", "DP-SGD, 10 rounds", 0.0),
            ("Noise that falls by steps is better than noise that falls linearly", V2_S, "V2, linear decay", 0.0),
            ("Noise that falls by steps is better than noise that falls with time", V2_S, "V2, time decay", 0.0),
            ("Noise that falls by steps is better than constant noise", V2_S, "V2, constant noise", 0.0),
            ("K = 50 is more accurate than K = 10", f"{V2_S}, K 50", V2_S, 0.0),
            ("R = 0.9 is more accurate than R = 0.5", f"{V2_S}, R 0.9", V2_S, 0.0),
            ("R = 0.1 costs more than 20 points against R = 0.5", V2_S, f"{V2_S}, R 0.1", 20.0),
            ("10 rounds are better than 100", f"{V2_S}, 10 rounds", V2_S, 0.0),
            ("10 rounds are better than 80", f"{V2_S}, 10 rounds", f"{V2_S}, 80 rounds", 0.0),
            (
                "Batches of 1,024 are better than of 256",
                f"{V2_S}, 30 rounds of 1,024",
                f"{V2_S}, 30 rounds of 256",
                0.0,
            ),
            ("Batches of 1,024 are better than of 4,096", f"{V2_S}, 30 rounds of 1,024", f"{V2_S}, 30 rounds", 0.0),
        )
    ),
    choices=(
        "A linear model on scattering features that a public random matrix takes to 512 columns, instead of the "
        "paper's CNN; plain SGD with momentum instead of AdamW with one-cycle rates (tables 20 and 21 are on "
        "[mnist8_optimizers](mnist8_optimizers.md)).",
        "100 rounds of batches of 4,096 unless the arm says another number; K = 10 and R = 0.5 unless it says "
        "another. The paper's batches are 64, and 16 to 256: a hundred rounds of them take too long for 20 "
        "replicas, so the batches here are 256, 1,024, 4,096 and 16,384, over 30 rounds.",
        "The noise that falls linearly and with time has the paper's rates .99 and .01. First noise multipliers "
        "follow from epsilon 1, counted per step; the paper's composes once per round.",
        "SGD without privacy has 10 rounds.",
    ),
    measures=("overall", "worst"),
    score="overall",
    matched=False,
    trials=2,
    kind="images",
)

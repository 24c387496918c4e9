"""The zoo: mechanisms that look right and are not. The kit must reject every one, by the check that it names.

They are unregistered, so no command knows them.
"""

from __future__ import annotations

from wrong_mechanisms import batch_rules, noise, ordered_rules, sample_rules, sampling, stateful_rules, steps
from wrong_mechanisms.base import Wrong

ZOO: tuple[Wrong, ...] = (
    *sample_rules.MEMBERS,
    *batch_rules.MEMBERS,
    *ordered_rules.MEMBERS,
    *stateful_rules.MEMBERS,
    *steps.MEMBERS,
    *noise.MEMBERS,
    *sampling.MEMBERS,
)
"""Every wrong mechanism, with the check that must catch it."""

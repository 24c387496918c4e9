"""The zoo: mechanisms that look right and are not. The kit must reject every one, by the check that it names.

They are unregistered, so no command knows them. Use them to test a kit of your own.
"""

from __future__ import annotations

from evenhand.testing import zoo_batches, zoo_noise, zoo_orders, zoo_rows, zoo_samples, zoo_states, zoo_steps
from evenhand.testing.wrongs import Wrong

ZOO: tuple[Wrong, ...] = (
    *zoo_rows.MEMBERS,
    *zoo_batches.MEMBERS,
    *zoo_orders.MEMBERS,
    *zoo_states.MEMBERS,
    *zoo_steps.MEMBERS,
    *zoo_noise.MEMBERS,
    *zoo_samples.MEMBERS,
)
"""Every wrong mechanism, with the check that must catch it."""

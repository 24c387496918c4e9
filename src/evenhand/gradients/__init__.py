"""Per-record gradient norms and weighted gradient sums from one forward and one backward.

``per_sample`` is the one-off form, ``Engine`` the one to keep over many steps, ``probe`` checks before training that a
record's gradient does not depend on the others, and ``register_kernel`` serves a layer type of your own.
"""

from evenhand.gradients import conv, embedding, linear, norms  # noqa: F401 - importing a kernel registers it
from evenhand.gradients.engine import Engine, per_sample
from evenhand.gradients.kernels import register_kernel
from evenhand.gradients.probe import probe

__all__ = ["Engine", "per_sample", "probe", "register_kernel"]

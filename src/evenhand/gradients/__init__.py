"""Per-record gradient norms and weighted gradient sums from one forward and one backward.

``per_sample`` is the one-off form, ``Engine`` the one to keep over many steps, ``probe`` checks before training that a
record's gradient does not depend on the others, and ``register_kernel`` serves a layer type of your own.
"""

from evenhand.gradients.doctor.doctor import examine
from evenhand.gradients.doctor.fixes import fix
from evenhand.gradients.doctor.independence_probe import probe
from evenhand.gradients.engine import Engine, per_sample
from evenhand.gradients.layers import (  # noqa: F401 - importing a kernel registers it
    attention,
    conv,
    embedding,
    linear,
    normalization,
    recurrent,
    transposed_linear,
)
from evenhand.gradients.layers.base import register_kernel
from evenhand.gradients.microbatches import MicroBatches
from evenhand.gradients.model_layout import Layout
from evenhand.model_io import Shared

__all__ = ["Engine", "Layout", "MicroBatches", "Shared", "examine", "fix", "per_sample", "probe", "register_kernel"]

"""Private training with the arguments of ``transformers.Trainer``; ``pip install 'evenhand[transformers]'``."""

from evenhand.integrations.transformers.trainer import PrivateTrainer

__all__ = ["PrivateTrainer"]

"""A density model again from the tensors of a run folder: they say what it is, so no code comes along."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from evenhand.density.fourier import Features
from evenhand.density.models import DensityModel, MomentModel, NoisyEmbeddingModel, RandomFeatureModel
from evenhand.density.moments import Embedding
from evenhand.errors import UsageError


def rebuilt(tensors: Mapping[str, Tensor]) -> DensityModel:
    """The model whose parameters these are.

    Examples:
      >>> import torch
      >>> model = MomentModel(3, Embedding(None, torch.zeros(3), torch.eye(3)), torch.eye(2, 3))
      >>> again = rebuilt(model.state_dict())
      >>> bool((again(torch.ones(1, 3)) == model(torch.ones(1, 3))).all())
      True
    """
    try:
        model = _shell(tensors)
        model.load_state_dict(dict(tensors))
    except (KeyError, RuntimeError, IndexError):
        raise UsageError("The saved tensors are not those of a density: the model file was exchanged.") from None
    return model


def _shell(tensors: Mapping[str, Tensor]) -> DensityModel:
    embedding = Embedding(*(tensors.get(name) for name in ("sketch", "mean", "matrix")))
    first = [tensors[name].shape[0] for name in ("sketch", "mean", "matrix", "frequencies") if name in tensors]
    if "frequencies" in tensors:
        features = Features(tensors["frequencies"], 1.0)
        return RandomFeatureModel(first[0], embedding, features, tensors["centres"], tensors["counts"])
    if "means" in tensors:
        return MomentModel(first[0], embedding, tensors["means"])
    width = first[0] if first else tensors["points"].shape[1]
    rows = (tensors[name] for name in ("points", "labels", "variance", "log_weights"))
    return NoisyEmbeddingModel(width, embedding, *rows)

"""One walk over a model's modules per pass: what ``named_modules`` and ``named_parameters`` give, but quicker."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

Modules: TypeAlias = list[tuple[str, nn.Module]]
Trainable: TypeAlias = dict[str, nn.Parameter]


def modules_of(model: nn.Module) -> Modules:
    """Names and modules, each module once, parents first; the inside of a ScriptModule is not entered.

    >>> [name for name, _ in modules_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()))]
    ['', '0', '0.0', '1']
    """
    found: Modules = []
    seen: set[int] = set()
    stack: Modules = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        if not isinstance(module, torch.jit.ScriptModule):
            prefix = name + "." if name else ""
            children = [(prefix + child, m) for child, m in module._modules.items() if m is not None]
            stack.extend(reversed(children))
    return found


def trainable_of(modules: Modules) -> Trainable:
    """The parameters that require a gradient, each once, under the name that ``named_parameters`` gives it.

    >>> list(trainable_of(modules_of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)))))
    ['0.weight', '0.bias', '1.weight']
    """
    found: Trainable = {}
    seen: set[int] = set()
    for prefix, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}.{name}" if prefix else name] = parameter
    return found

"""Settings of ``TrainingArguments`` in the words of ``fit``: mapped, refused with a reason, or idle.

Batches are drawn by Poisson sampling and records are bounded one by one, so what a Trainer does to whole batches has
no counterpart: such settings are refused before anything is spent, never dropped in silence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from evenhand.errors import UsageError
from evenhand.integrations.transformers.library import library
from evenhand.training.guards.model_guards import Compute
from evenhand.training.optimizers import OptimizerFactory, SchedulerFactory

REFUSED: Mapping[str, str] = {
    "fp16": "its loss scaler follows the gradients of all records together; use bf16=True",
    "fp16_full_eval": "evaluation runs in the model's own precision; leave it out",
    "bf16_full_eval": "evaluation runs in the model's own precision; leave it out",
    "deepspeed": "steps are taken on one device; leave it out",
    "fsdp": "steps are taken on one device; leave it out",
    "parallelism_config": "steps are taken on one device; leave it out",
    "torch_compile": "compiled models hide the layers whose gradients are needed for each record; leave it out",
    "use_liger_kernel": "its kernels compute a mean loss of the batch; leave it out",
    "gradient_checkpointing": "it hides layers; for less memory lower per_device_train_batch_size",
    "activation_checkpointing": "it hides layers; for less memory lower per_device_train_batch_size",
    "neftune_noise_alpha": "its hook draws from a generator that is not secret; leave it out",
    "full_determinism": "noise that can be predicted protects nobody; for research pass insecure_seed=",
    "group_by_length": "batches chosen by length are not the Poisson batches that the accountant counts; leave it out",
    "dataloader_drop_last": "Poisson batches have random sizes and none is dropped; leave it out",
    "optim_args": "pass an optimizer of your own, optimizers=(optimizer, None)",
    "optim_target_modules": "pass an optimizer of your own, optimizers=(optimizer, None)",
    "load_best_model_at_end": "the last weights are released; leave it out",
    "push_to_hub": "nothing is pushed by itself; leave it out, read the card, then call model.push_to_hub",
    "batch_eval_metrics": "metrics are computed over all held-out records at once; leave it out",
    "prediction_loss_only": "the report needs the answers; leave it out",
    "include_num_input_tokens_seen": "how many tokens were seen is a private number; leave it out",
    "include_for_metrics": "compute_metrics is given predictions and labels only; leave it out",
    "eval_on_start": "call evaluate() before train()",
    "debug": "its hooks look at raw gradients; leave it out",
}
"""Settings that are refused if they are switched on, and why or what to do instead."""

MAPPED = frozenset(
    {
        *("output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing_factor", "bf16", "seed"),
        *("eval_strategy", "save_strategy", "report_to", "use_cpu", "use_cache", "remove_unused_columns"),
        *("label_names", "auto_find_batch_size", "max_grad_norm", "train_sampling_strategy", "disable_tqdm"),
    }
)
"""Settings that are followed. When memory runs out, micro-batches are halved, as auto_find_batch_size asks."""

IDLE = frozenset(
    {
        *("average_tokens_across_devices", "tf32", "activation_checkpointing_kwargs", "local_rank"),
        *("gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode", "liger_kernel_config"),
        *("torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node"),
        *("logging_nan_inf_filter", "log_level", "log_level_replica", "run_name", "project", "trackio_space_id"),
        *(
            "trackio_bucket_id",
            "trackio_static_space_id",
            "eval_steps",
            "eval_delay",
            "per_device_eval_batch_size",
            "eval_do_concat_batches",
        ),
        *("eval_use_gather_object", "eval_accumulation_steps", "save_only_model", "save_steps", "save_on_each_node"),
        *("save_total_limit", "enable_jit_checkpoint", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
        *("hub_always_push", "hub_revision", "metric_for_best_model", "greater_is_better", "ignore_data_skip"),
        *("restore_callback_states_from_checkpoint", "data_seed", "accelerator_config", "dataloader_num_workers"),
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "fsdp_config"),
        *("dataloader_multiprocessing_context", "dataloader_in_order", "length_column_name", "ddp_timeout"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    }
)
"""Settings without effect here: loaders, several devices, when to log and to save. The run saves itself and resumes."""

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
_PLAIN = ("linear", "constant", "cosine")
"""Schedules that are ours too, under the same name."""


@dataclass(frozen=True)
class Settings:
    """Settings of ``fit`` that TrainingArguments ask for; ``batch_size`` is the expected number of records."""

    batch_size: int
    micro_batch: int
    epochs: float
    max_steps: int
    lr: float
    scheduler: str | SchedulerFactory
    smoothing: float
    bf16: bool
    saves: bool

    def passes(self, records: int) -> float:
        """Return the expected passes over so many records; ``max_steps`` counts before epochs, as in a Trainer.

        Examples:
          >>> import math
          >>> few = Settings(32, 8, 3.0, 10, 0.1, "linear", 0.0, False, False)
          >>> math.ceil(few.passes(1000) * 1000 / 32)
          10
        """
        return (self.max_steps - 0.5) * self.batch_size / records if self.max_steps > 0 else self.epochs

    @property
    def compute(self) -> Compute:
        """Return how gradients are computed: the batch of a device is the micro-batch."""
        return Compute(micro_batch=self.micro_batch, precision="bf16" if self.bf16 else "float32")


def settings_of(args: Any) -> Settings:
    """Return the settings of TrainingArguments; raise for those that would break the promise.

    Examples:
      >>> from types import SimpleNamespace
      >>> settings_of(SimpleNamespace(per_device_train_batch_size=16, gradient_accumulation_steps=4)).batch_size
      64
      >>> settings_of(SimpleNamespace(fp16=True))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      evenhand.errors.UsageError: TrainingArguments cannot be followed in fp16=True: its loss scaler follows ...
    """
    _refuse(args)
    micro = int(_given(args, "per_device_train_batch_size", 8))
    return Settings(
        batch_size=micro * int(_given(args, "gradient_accumulation_steps", 1)),
        micro_batch=micro,
        epochs=float(_given(args, "num_train_epochs", 3.0)),
        max_steps=int(_given(args, "max_steps", -1)),
        lr=float(_given(args, "learning_rate", 5e-5)),
        scheduler=_schedule(args),
        smoothing=float(_given(args, "label_smoothing_factor", 0.0)),
        bf16=bool(_given(args, "bf16", False)),
        saves=_name(_given(args, "save_strategy", "steps")) != "no",
    )


def optimizer_of(args: Any, model: nn.Module) -> OptimizerFactory:
    """Return the optimizer that ``optim`` names; weights of one dimension (biases, norms) do not decay, as in Trainer.

    Examples:
      >>> from types import SimpleNamespace
      >>> layer = nn.Linear(2, 1)
      >>> made = optimizer_of(SimpleNamespace(weight_decay=0.1), layer)(layer.parameters())
      >>> [group["weight_decay"] for group in made.param_groups]
      [0.1, 0.0]
    """
    kind, settings = (
        OPTIMIZERS[_name(_given(args, "optim", "adamw_torch"))],
        {"lr": float(_given(args, "learning_rate", 5e-5))},
    )
    if kind is torch.optim.AdamW:
        betas = _given(args, "adam_beta1", 0.9), _given(args, "adam_beta2", 0.999)
        return partial(_built, kind, args, {**settings, "betas": betas, "eps": _given(args, "adam_epsilon", 1e-8)})
    return partial(_built, kind, args, settings)


def _built(kind: Any, args: Any, settings: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    decay, parameters = float(_given(args, "weight_decay", 0.0)), list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = kind([group for group in groups if group["params"]], **settings)
    return optimizer


def _schedule(args: Any) -> str | SchedulerFactory:
    """Return the learning-rate schedule: by our name where there is no warm-up, else the one of transformers."""
    name = _name(_given(args, "lr_scheduler_type", "linear"))
    warms = _given(args, "warmup_steps", 0) or _given(args, "warmup_ratio", 0)
    extra = _given(args, "lr_scheduler_kwargs", None)
    if name in _PLAIN and not warms and not extra:
        return name

    def build(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        warm = args.get_warmup_steps(steps)
        made: LRScheduler = library().get_scheduler(
            name, optimizer, num_warmup_steps=warm, num_training_steps=steps, scheduler_specific_kwargs=extra
        )
        return made

    return build


def _refuse(args: Any) -> None:
    """Raise for all settings together that cannot be followed, each with what to do instead."""
    if reasons := list(_unfollowed(args)):
        listed = reasons[0] if len(reasons) == 1 else f"{len(reasons)} settings:\n- " + "\n- ".join(reasons) + "\n"
        raise UsageError(
            f"TrainingArguments cannot be followed in {listed}{'. ' * (len(reasons) == 1)}Nothing was spent."
        )


def _unfollowed(args: Any) -> Iterator[str]:
    """Yield the settings that are switched on and cannot be followed, with the reasons."""
    for name, why in REFUSED.items():
        value = _given(args, name, None)
        if value and _name(value) != "no":
            yield f"{name}={_shown(value)}: {why}"
    if _name(_given(args, "eval_strategy", "no")) == "steps":
        yield "eval_strategy='steps': held-out records are measured after every epoch; use 'epoch'"
    if _name(_given(args, "train_sampling_strategy", "random")) != "random":
        yield "train_sampling_strategy: rows are drawn by Poisson sampling, as the accountant counts them; leave it out"
    if (bound := _given(args, "max_grad_norm", 1.0)) not in (None, 0, 0.0, 1.0):
        yield (
            f"max_grad_norm={_shown(bound)}: it bounds a batch, and here every record is bounded; give "
            f"PrivateTrainer settings={{'bound': {_shown(bound)}}}"
        )
    name = _name(_given(args, "optim", "adamw_torch"))
    if name not in OPTIMIZERS:
        yield f"optim={name!r}: use {', '.join(OPTIMIZERS)}, or pass one of your own, optimizers=(optimizer, None)"
    if not isinstance(args, type) and dataclasses.is_dataclass(args):
        yield from _unknown(args)


def _unknown(args: Any) -> Iterator[str]:
    """Yield settings that a later version of transformers has and that were changed."""
    usual = {field.name: field.default for field in dataclasses.fields(args)}
    for name in sorted(usual.keys() - MAPPED - IDLE - REFUSED.keys()):
        if usual[name] is not dataclasses.MISSING and getattr(args, name) != usual[name]:
            yield f"{name}: this setting is not known here; leave it out"


def _given(args: Any, name: str, default: Any) -> Any:
    return getattr(args, name, default)


def _name(value: Any) -> str:
    """Return the word of an enum or a string."""
    return str(getattr(value, "value", value))


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float) else "..."

"""Sixty-six architectures that nobody here wrote (but the last ones), built from configs with random weights.

Small sizes, no dropout: what is asked is whether the engine takes the model, how, and whether it is right. Nothing is
downloaded. timm wants torchvision for its data sets and for one class; a stand-in is enough for its models.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, TIME, WIDTH, CLASSES = 211, 12, 32, 5
Batch = tuple[Any, Tensor]


@dataclass(frozen=True)
class Real:
    """A model to be built, what its records look like, and its loss. ``couples``: it uses statistics of the batch."""

    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    couples: bool = False


def output(outputs: Any) -> Tensor:
    """The scores of a model, whatever it wraps them in."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, tuple):
        return output(outputs[0])
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    raise TypeError(type(outputs).__name__)


def classified(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of the first classes; scores with further dimensions are averaged over them first."""
    scores = output(outputs)
    scores = scores.flatten(1, -2).mean(1) if scores.dim() > 2 else scores
    return functional.cross_entropy(scores, targets, reduction="none")


def next_token(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, one value per record."""
    scores = output(outputs)[:, :-1]
    each = functional.cross_entropy(scores.flatten(0, 1), targets[:, 1:].flatten(), reduction="none")
    return each.view(len(targets), -1).mean(1)


def squared(outputs: Any, targets: Tensor) -> Tensor:
    """Mean square of the scores' distance from the target, one value per record."""
    return (output(outputs).flatten(1) - targets.unsqueeze(1).to(output(outputs).dtype)).square().mean(1)


def tokens(size: int) -> Tensor:
    return torch.randint(3, WORDS - 3, (size, TIME))


def labels(size: int) -> Tensor:
    return torch.arange(size) % CLASSES


def text(size: int) -> Batch:
    """Ids and a mask, as a tokenizer gives them; two ids are padding."""
    ids, mask = tokens(size), torch.ones(size, TIME, dtype=torch.long)
    mask[::2, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}, labels(size)


def text_ending(size: int) -> Batch:
    """Ids that end with the sign for the end, which some models look for."""
    (inputs, targets) = text(size)
    inputs["input_ids"][:, -1] = 2
    inputs["attention_mask"][:] = 1
    return inputs, targets


def language(size: int) -> Batch:
    ids = tokens(size)
    return {"input_ids": ids}, ids


def two_texts(size: int) -> Batch:
    ids = tokens(size)
    return {"input_ids": ids, "decoder_input_ids": tokens(size)}, ids


def pictures(side: int = 32, name: str | None = "pixel_values") -> Callable[[int], Batch]:
    def data(size: int) -> Batch:
        x = torch.randn(size, 3, side, side)
        return ({name: x} if name else x), labels(size)

    return data


def sound(size: int) -> Batch:
    return {"input_values": torch.randn(size, 800)}, labels(size)


def spectrum(size: int) -> Batch:
    return {"input_features": torch.randn(size, 16, 24)}, labels(size)


def rows(width: int, *, numbers: bool = True) -> Callable[[int], Batch]:
    def data(size: int) -> Batch:
        return (torch.randn(size, width) if numbers else torch.randint(7, (size, width))), labels(size)

    return data


def sequences(channels: int, time: int) -> Callable[[int], Batch]:
    return lambda size: (torch.randn(size, channels, time), labels(size))


def table(size: int) -> Batch:
    return (torch.randn(size, 6), torch.randint(4, (size, 3))), labels(size)


USUAL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def hf(kind: str, head: str, /, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers by the name of its config and of its class."""

    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        known = {"vocab_size": WORDS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "num_labels": CLASSES}
        config = getattr(library, kind + "Config")(**{**known, **options})
        return getattr(library, head)(config)

    return build


def hf_text(kind: str, **options: Any) -> Real:
    return Real(hf(kind, kind + "ForSequenceClassification", **{**USUAL, **options}), text, classified)


def hf_language(kind: str, head: str = "ForCausalLM", **options: Any) -> Real:
    return Real(hf(kind, kind + head, **{**USUAL, **options}), language, next_token)


def hf_vision(kind: str, **options: Any) -> Real:
    sizes = {"image_size": 32, "patch_size": 8}
    return Real(hf(kind, kind + "ForImageClassification", **{**sizes, **options}), pictures(), classified)


LLAMA = {**USUAL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SHORT = {"max_position_embeddings": 64}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
BOTH = {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
SOUND = {
    **USUAL, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
CLIP_TOWER = {**USUAL, "projection_dim": 16}

TRANSFORMERS: dict[str, Real] = {
    "BERT": hf_text("Bert", **SHORT),
    "MiniLM (BERT, 384 wide)": hf_text("Bert", hidden_size=384, num_attention_heads=12, intermediate_size=1536),
    "RoBERTa": hf_text("Roberta", **SHORT),
    "DistilBERT": hf_text("DistilBert", dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=64),
    "ALBERT": hf_text("Albert", embedding_size=16, **SHORT),
    "ELECTRA": hf_text("Electra", embedding_size=16, **SHORT),
    "DeBERTa-v2": hf_text("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], **SHORT),
    "MPNet": hf_text("MPNet", **SHORT),
    "SqueezeBERT": hf_text("SqueezeBert", embedding_size=WIDTH, **SHORT),
    "ConvBERT": hf_text("ConvBert", embedding_size=WIDTH, **SHORT),
    "FNet": Real(
        hf("FNet", "FNetForSequenceClassification", **USUAL, **SHORT),
        lambda size: ({"input_ids": tokens(size)}, labels(size)),
        classified,
    ),
    "GPT-2": hf_language("GPT2", "LMHeadModel", **GPT2),
    "GPT-Neo": hf_language(
        "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], max_position_embeddings=64
    ),
    "GPT-J": hf_language("GPTJ", **GPT2, rotary_dim=4),
    "GPT-NeoX": hf_language("GPTNeoX", **SHORT),
    "OPT": hf_language("OPT", ffn_dim=64, word_embed_proj_dim=WIDTH, **SHORT),
    "BLOOM": hf_language("Bloom", n_layer=2, n_head=4),
    "LLaMA": hf_language("Llama", **LLAMA),
    "Mistral": hf_language("Mistral", **LLAMA),
    "Mixtral (experts)": hf_language("Mixtral", **LLAMA, num_local_experts=4),
    "Gemma": hf_language("Gemma", **LLAMA),
    "Gemma 2": hf_language("Gemma2", **LLAMA),
    "Qwen2": hf_language("Qwen2", **LLAMA),
    "Qwen3": hf_language("Qwen3", **LLAMA),
    "Phi": hf_language("Phi", **LLAMA),
    "Falcon": hf_language("Falcon", **SHORT),
    "Mamba": hf_language("Mamba", state_size=4),
    "BART": Real(hf("Bart", "BartForSequenceClassification", **BOTH), text_ending, classified),
    "T5": Real(hf("T5", "T5ForConditionalGeneration", **T5), two_texts, next_token),
    "ViT": hf_vision("ViT", **USUAL),
    "DeiT": hf_vision("DeiT", **USUAL),
    "BEiT": hf_vision("Beit", **USUAL),
    "Swin": hf_vision("Swin", patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "ConvNeXt": hf_vision("ConvNext", patch_size=4, hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    "DINOv2": hf_vision("Dinov2", **USUAL),
    "ResNet (batch statistics)": Real(
        hf("ResNet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        pictures(), classified, couples=True,
    ),
    "CLIP (pictures)": Real(
        hf("CLIPVision", "CLIPVisionModelWithProjection", **CLIP_TOWER, image_size=32, patch_size=8),
        pictures(), lambda out, y: squared(out.image_embeds, y),
    ),
    "Wav2Vec2": Real(hf("Wav2Vec2", "Wav2Vec2ForSequenceClassification", **SOUND), sound, classified),
    "HuBERT": Real(hf("Hubert", "HubertForSequenceClassification", **SOUND), sound, classified),
    "Whisper (encoder)": Real(
        hf("Whisper", "WhisperForAudioClassification", **{**BOTH, "max_source_positions": 12}, num_mel_bins=16,
           classifier_proj_size=16),
        spectrum, classified,
    ),
}  # fmt: skip


def timm(name: str, *, couples: bool = False, **options: Any) -> Real:
    side = options.pop("side", 32)

    def build() -> nn.Module:
        return _timm().create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return Real(build, pictures(side, None), classified, couples)


def _timm() -> Any:
    if "timm" in sys.modules:
        return sys.modules["timm"]
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("torchvision"):
            raise
        for module in [name for name in sys.modules if name.startswith("timm")]:
            del sys.modules[module]
    names = ["", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets"]
    stand_ins = {"torchvision" + name: _StandIn("torchvision" + name) for name in names}
    sys.modules |= stand_ins
    try:
        return importlib.import_module("timm")
    finally:
        for name in stand_ins:
            sys.modules.pop(name)


class _StandIn(types.ModuleType):
    """A module that has every name."""

    FrozenBatchNorm2d = type("FrozenBatchNorm2d", (nn.Module,), {})
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM: dict[str, Real] = {
    "timm ViT": timm("vit_tiny_patch16_224", **VIT),
    "timm DeiT (distilled)": timm("deit_tiny_distilled_patch16_224", **VIT),
    "timm CaiT": timm("cait_xxs24_224", **VIT),
    "timm MLP-Mixer": timm("mixer_s32_224", img_size=128, side=128),
    "timm ResMLP": timm("resmlp_12_224", img_size=64, side=64),
    "timm gMLP": timm("gmlp_ti16_224", img_size=64, side=64),
    "timm ConvNeXt": timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm PoolFormer": timm("poolformer_s12"),
    "timm ResNet-26 GroupNorm": timm("resnet50_gn", layers=(1, 1, 1, 1)),
    "timm ResNetV2 (BiT, StdConv)": timm("resnetv2_50x1_bit"),
    "timm NF-ResNet (ScaledStdConv)": timm("nf_resnet26"),
    "timm ResNet-18 (batch statistics)": timm("resnet18", couples=True),
    "timm EfficientNet (batch statistics)": timm("efficientnet_b0", couples=True),
}


def peft(base: Callable[[], nn.Module], kind: str, task: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = importlib.import_module("peft")
        config = getattr(library, kind)(task_type=getattr(library.TaskType, task), **options)
        return library.get_peft_model(base(), config)

    return build


_BERT, _GPT2, _LLAMA = (TRANSFORMERS[name].build for name in ("BERT", "GPT-2", "LLaMA"))
PEFT: dict[str, Real] = {
    "LoRA on BERT": Real(peft(_BERT, "LoraConfig", "SEQ_CLS", r=4), text, classified),
    "LoRA on GPT-2": Real(peft(_GPT2, "LoraConfig", "CAUSAL_LM", r=4, fan_in_fan_out=True), language, next_token),
    "IA3 on LLaMA": Real(peft(_LLAMA, "IA3Config", "CAUSAL_LM"), language, next_token),
    "prompt tuning of GPT-2": Real(
        peft(_GPT2, "PromptTuningConfig", "CAUSAL_LM", num_virtual_tokens=4),
        language, lambda out, y: next_token(output(out)[:, 4:], y),
    ),
}  # fmt: skip


def rtdl(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(importlib.import_module("rtdl_revisiting_models"), name)(**options)


def periodic() -> nn.Module:
    """Numbers as periodic features (PLR), then an MLP."""
    library = importlib.import_module("rtdl_num_embeddings")
    return nn.Sequential(library.PeriodicEmbeddings(6, 8, lite=False), nn.Flatten(), nn.Linear(48, CLASSES))


RTDL: dict[str, Real] = {
    "FT-Transformer": Real(
        rtdl("FTTransformer", n_cont_features=6, cat_cardinalities=[4, 4, 4], d_out=CLASSES, n_blocks=2, d_block=32,
             attention_n_heads=4, attention_dropout=0.0, ffn_d_hidden=None, ffn_d_hidden_multiplier=2,
             ffn_dropout=0.0, residual_dropout=0.0),
        table, classified,
    ),
    "rtdl MLP": Real(rtdl("MLP", d_in=6, d_out=CLASSES, n_blocks=2, d_block=32, dropout=0.0), rows(6), classified),
    "rtdl ResNet (batch statistics)": Real(
        rtdl("ResNet", d_in=6, d_out=CLASSES, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0,
             dropout1=0.0, dropout2=0.0),
        rows(6), classified, couples=True,
    ),
    "MLP-PLR (periodic numbers)": Real(periodic, rows(6), classified),
}  # fmt: skip


class Recurrent(nn.Module):
    """Embedded characters, a recurrent layer, the last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(7, 16), layer, nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(x))[0][:, -1])


def autoencoder() -> nn.Module:
    """Down by convolutions, up by transposed ones."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, padding=1),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    """A temporal convolution net with weight norm."""
    normed = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        normed(nn.Conv1d(4, 16, 3, padding=1)), nn.ReLU(), normed(nn.Conv1d(16, 16, 3, padding=2, dilation=2)),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


OWN: dict[str, Real] = {
    "MLP": Real(lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, CLASSES)), rows(20), classified),
    "1D CNN": Real(
        lambda: nn.Sequential(nn.Conv1d(4, 16, 5), nn.ReLU(), nn.Conv1d(16, 32, 5), nn.ReLU(),
                              nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES)),
        sequences(4, 40), classified,
    ),
    "LSTM": Real(lambda: Recurrent(nn.LSTM(16, 24, batch_first=True)), rows(10, numbers=False), classified),
    "autoencoder (ConvTranspose)": Real(autoencoder, pictures(16, None), squared),
    "TCN with weight norm": Real(weight_normed, sequences(4, 20), classified),
}  # fmt: skip

MODELS: dict[str, Real] = {**TRANSFORMERS, **TIMM, **PEFT, **RTDL, **OWN}

TOKENS, WORDS_OF_BERT = 64, 30_522
MIDDLE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def long_text(size: int) -> Batch:
    mask = torch.ones(size, TOKENS, dtype=torch.long)
    mask[::2, -16:] = 0
    return {"input_ids": torch.randint(3, 1000, (size, TOKENS)), "attention_mask": mask}, labels(size)


def long_language(size: int) -> Batch:
    ids = torch.randint(3, 1000, (size, TOKENS))
    return {"input_ids": ids}, ids


def short_language(size: int) -> Batch:
    ids = torch.randint(3, 50_000, (size, 32))
    return {"input_ids": ids}, ids


_MINILM = hf("Bert", "BertForSequenceClassification", **{**MIDDLE, "vocab_size": WORDS_OF_BERT})
USUAL_SIZES: dict[str, tuple[Real, int]] = {
    "MiniLM (6 layers, 384 wide), 16 x 64": (Real(_MINILM, long_text, classified), 16),
    "BERT (4 layers, 512 wide), 16 x 64": (
        Real(
            hf("Bert", "BertForSequenceClassification", vocab_size=WORDS_OF_BERT, hidden_size=512,
               num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048),
            long_text, classified,
        ),
        16,
    ),
    "GPT-2 (6 layers, 384 wide), 16 x 64": (
        Real(
            hf("GPT2", "GPT2LMHeadModel", n_embd=384, n_layer=6, n_head=6, vocab_size=8000),
            long_language, next_token,
        ),
        16,
    ),
    "LLaMA (6 layers, 384 wide), 16 x 64": (
        Real(
            hf("Llama", "LlamaForCausalLM", **{**MIDDLE, "intermediate_size": 1024, "vocab_size": 8000}),
            long_language, next_token,
        ),
        16,
    ),
    "ViT (6 layers, 384 wide), 16 x 64": (
        Real(hf("ViT", "ViTForImageClassification", **MIDDLE, image_size=64, patch_size=8), pictures(64), classified),
        16,
    ),
    "LoRA on MiniLM, 16 x 64": (Real(peft(_MINILM, "LoraConfig", "SEQ_CLS", r=8), long_text, classified), 16),
    "GPT-2 as published (50,257 words), 8 x 32": (
        Real(hf("GPT2", "GPT2LMHeadModel", vocab_size=50_257), short_language, next_token),
        8,
    ),
}  # fmt: skip
"""Sizes that people train, for the bars on time; the last one is for time and memory with a large vocabulary."""

"""Models of transformers and diffusers: their own code, configurations of moderate size.

Attention is what the libraries choose by default. Dropout is off, but for GPT-2, which trains with
its default of 0.1, and DiT, which drops class labels: their steps draw random numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normpass.benchmarks.zoo import BOTH, Made, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WORDS = 32000


def own_loss(model: nn.Module, **inputs: Tensor) -> Tensor:
    """The loss that a model of transformers computes from its labels."""
    return model(**inputs).loss


def restore(model: nn.Module, target: Tensor, **inputs: Any) -> Tensor:
    """Mean square error of a diffuser's output to a fixed target: noise, or an image."""
    return F.mse_loss(model(**inputs, return_dict=False)[0].float(), target.float())


# --- transformers -------------------------------------------------------------------------------


def transformer(
    config: str, model: str, inputs: Callable[..., dict[str, Tensor]], **fields: Any
) -> Made:
    """A class of transformers from its configuration; `call` among the fields sizes the inputs."""
    import transformers

    call = fields.pop("call")
    module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**fields))
    return Made(module, inputs(**call))


def text(batch: int, tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """input_ids: n t; the labels are the same words, which the model shifts."""
    words = torch.randint(3, vocabulary, (batch, tokens))
    return {"input_ids": words, "labels": words}


def two_texts(batch: int, tokens: int, vocabulary: int) -> dict[str, Tensor]:
    """A text and half as long an answer to it."""
    words = torch.randint(3, vocabulary, (batch, tokens))
    return {"input_ids": words, "labels": torch.randint(3, vocabulary, (batch, tokens // 2))}


def picture(batch: int, pixels: int, classes: int) -> dict[str, Tensor]:
    """pixel_values: n 3 h w, labels: n"""
    images = torch.randn(batch, 3, pixels, pixels)
    return {"pixel_values": images, "labels": torch.randint(classes, (batch,))}


def pixelwise(batch: int, pixels: int, classes: int) -> dict[str, Tensor]:
    """pixel_values: n 3 h w, labels: n h w"""
    images = torch.randn(batch, 3, pixels, pixels)
    return {
        "pixel_values": images,
        "labels": torch.randint(classes, (batch, pixels, pixels)),
    }


def family(
    name: str,
    classes: tuple[str, str],
    inputs: Callable[..., dict[str, Tensor]],
    sizes: Mapping[str, Any],
    tiny: Mapping[str, Any],
    formats: tuple[str, ...] = ("contiguous",),
) -> Model:
    """A model of transformers; classes: of its configuration, and its own."""
    make = partial(transformer, *classes, inputs)
    return Model(name, make, own_loss, sizes, tiny, "transformers", formats)


def call(batch: int, tokens: int, vocabulary: int = WORDS) -> dict[str, int]:
    """Sizes of a batch of texts."""
    return {"batch": batch, "tokens": tokens, "vocabulary": vocabulary}


SMALL_WORDS = 60
WIDTH = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
}
TINY_WIDTH = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "vocab_size": SMALL_WORDS,
    "call": call(2, 12, SMALL_WORDS),
}
DECODER = {**WIDTH, "num_key_value_heads": 2, "head_dim": 64, "use_cache": False, "pad_token_id": 0}

TRANSFORMERS = (
    family(
        "bert",
        ("BertConfig", "BertForMaskedLM"),
        text,
        {
            **WIDTH,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "call": call(8, 128),
        },
        TINY_WIDTH,
    ),
    family(
        "qwen3",
        ("Qwen3Config", "Qwen3ForCausalLM"),
        text,
        {**DECODER, "call": call(2, 512)},
        {**TINY_WIDTH, "head_dim": 8},
    ),
    family(
        "gemma3",
        ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        text,
        {**DECODER, "call": call(2, 512)},
        {**TINY_WIDTH, "head_dim": 8},
    ),
    family(
        "t5",
        ("T5Config", "T5ForConditionalGeneration"),
        two_texts,
        {
            "d_model": 256,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": WORDS,
            "dropout_rate": 0.0,
            "use_cache": False,
            "decoder_start_token_id": 0,
            "call": call(4, 256),
        },
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "vocab_size": SMALL_WORDS,
            "call": call(2, 12, SMALL_WORDS),
        },
    ),
    family(
        "gpt2",
        ("GPT2Config", "GPT2LMHeadModel"),
        text,
        {
            "n_embd": 256,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": WORDS,
            "use_cache": False,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "call": call(2, 512),
        },
        {
            "n_embd": 32,
            "n_layer": 1,
            "vocab_size": SMALL_WORDS,
            "call": call(2, 12, SMALL_WORDS),
        },
    ),
    family(
        "swinv2",
        ("Swinv2Config", "Swinv2ForImageClassification"),
        picture,
        {
            "image_size": 128,
            "patch_size": 4,
            "embed_dim": 64,
            "depths": [2, 2, 2],
            "num_heads": [2, 4, 8],
            "window_size": 8,
            "drop_path_rate": 0.0,
            "num_labels": 100,
            "call": {"batch": 8, "pixels": 128, "classes": 100},
        },
        {
            "image_size": 32,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
            "call": {"batch": 2, "pixels": 32, "classes": 100},
        },
    ),
    family(
        "mobilenetv2",
        ("MobileNetV2Config", "MobileNetV2ForImageClassification"),
        picture,
        {
            "image_size": 128,
            "classifier_dropout_prob": 0.0,
            "num_labels": 100,
            "call": {"batch": 16, "pixels": 128, "classes": 100},
        },
        {"depth_multiplier": 0.25, "call": {"batch": 4, "pixels": 64, "classes": 100}},
        formats=BOTH,
    ),
    family(
        "segformer",
        ("SegformerConfig", "SegformerForSemanticSegmentation"),
        pixelwise,
        {
            "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
            "num_labels": 20,
            "call": {"batch": 8, "pixels": 128, "classes": 20},
        },
        {
            "hidden_sizes": [8, 16, 32, 32],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 16,
            "call": {"batch": 2, "pixels": 64, "classes": 20},
        },
    ),
)

# --- diffusers ----------------------------------------------------------------------------------


def diffuser(
    model: str, inputs: Callable[..., dict[str, Any]], *, call: Mapping[str, int], **fields: Any
) -> Made:
    """A class of diffusers from its fields; call: the sizes of its inputs."""
    import diffusers

    return Made(getattr(diffusers, model)(**fields), inputs(**call))


def noisy(batch: int, channels: int, pixels: int) -> dict[str, Tensor]:
    """sample and target: n c h w, timestep: n"""
    sample, target = torch.randn(2, batch, channels, pixels, pixels)
    return {"sample": sample, "target": target, "timestep": torch.randint(1000, (batch,))}


def prompted(batch: int, channels: int, pixels: int, tokens: int, width: int) -> dict[str, Tensor]:
    """Noisy images, each with a text of n t d."""
    states = torch.randn(batch, tokens, width)
    return {**noisy(batch, channels, pixels), "encoder_hidden_states": states}


def labelled(batch: int, channels: int, pixels: int) -> dict[str, Tensor]:
    """Noisy images, each with a class; the output has twice the channels: noise and variance."""
    inputs = noisy(batch, channels, pixels)
    inputs["hidden_states"] = inputs.pop("sample")
    inputs["target"] = torch.randn(batch, 2 * channels, pixels, pixels)
    return {**inputs, "class_labels": torch.randint(1000, (batch,))}


def image_alone(batch: int, channels: int, pixels: int) -> dict[str, Tensor]:
    """An image and another one to turn it into: n c h w"""
    sample, target = torch.randn(2, batch, channels, pixels, pixels)
    return {"sample": sample, "target": target}


def diffusion(
    name: str,
    model: str,
    inputs: Callable[..., dict[str, Any]],
    sizes: Mapping[str, Any],
    tiny: Mapping[str, Any],
    formats: tuple[str, ...] = BOTH,
) -> Model:
    """A model of diffusers, of that class."""
    return Model(name, partial(diffuser, model, inputs), restore, sizes, tiny, "diffusers", formats)


DIFFUSERS = (
    diffusion(
        "unet",
        "UNet2DModel",
        noisy,
        {
            "sample_size": 32,
            "block_out_channels": (64, 128, 128),
            "layers_per_block": 2,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 64,
            "call": {"batch": 8, "channels": 3, "pixels": 32},
        },
        {
            "block_out_channels": (32, 32, 32),
            "layers_per_block": 1,
            "attention_head_dim": 8,
            "call": {"batch": 2, "channels": 3, "pixels": 8},
        },
    ),
    diffusion(
        "unet_condition",
        "UNet2DConditionModel",
        prompted,
        {
            "sample_size": 32,
            "block_out_channels": (64, 128),
            "layers_per_block": 1,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 128,
            "attention_head_dim": 4,
            "call": {"batch": 4, "channels": 4, "pixels": 32, "tokens": 77, "width": 128},
        },
        {
            "sample_size": 8,
            "block_out_channels": (32, 32),
            "call": {"batch": 2, "channels": 4, "pixels": 8, "tokens": 5, "width": 128},
        },
    ),
    diffusion(
        "autoencoder",
        "AutoencoderKL",
        image_alone,
        {
            "sample_size": 64,
            "block_out_channels": (64, 128),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "layers_per_block": 1,
            "latent_channels": 4,
            "call": {"batch": 4, "channels": 3, "pixels": 64},
        },
        {
            "block_out_channels": (32, 32),
            "call": {"batch": 2, "channels": 3, "pixels": 16},
        },
    ),
    diffusion(
        "dit",
        "DiTTransformer2DModel",
        labelled,
        {
            "sample_size": 32,
            "num_layers": 4,
            "num_attention_heads": 6,
            "attention_head_dim": 64,
            "in_channels": 4,
            "out_channels": 8,
            "call": {"batch": 4, "channels": 4, "pixels": 32},
        },
        {
            "sample_size": 8,
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "call": {"batch": 2, "channels": 4, "pixels": 8},
        },
        formats=("contiguous",),
    ),
)
MODELS = (*TRANSFORMERS, *DIFFUSERS)

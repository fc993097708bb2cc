"""Tiny models of many families, with random weights, in float64: diffusers and transformers.

They are built from their configurations: nothing is downloaded. Dropout is off, so that eager and
compiled runs have the same gradients, and what they compute in float32 whatever they are given
(norms, softmax, rotations) is in float64 too: there Inductor's are up to 5e-7 off eager's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from normpass.benchmarks.exact import in_double

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Tensor = torch.Tensor

BATCH, LENGTH, VOCABULARY, PIXELS = 2, 11, 61, 32
# Gradients that are zero in exact arithmetic, as of a key's bias, are all rounding: errors are
# measured against no less than this part of the largest gradient.
SMALLEST = 1e-3
# Sums in another order, over some tens of layers; a wrong gradient is off by about 1.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Family:
    """What a model is made from and called with. package: the one that must be installed."""

    package: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]


@in_double()
def compare(
    family: Family, backend: str = "normpass", *, options: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """All gradients of a model, compiled against eager: of each parameter that takes part, how far
    it is, relative to its largest element. With normpass its norms were fused, or left to Inductor
    because they are so small.
    """
    torch.manual_seed(0)
    model = family.build().double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = family.inputs()
    right = gradients(model, model, inputs)
    compiled = torch.compile(model, backend=backend, dynamic=False, options=dict(options or {}))
    found = gradients(compiled, model, inputs)
    regions = [what.partition(" ")[0] for what in counters["normpass"]]
    if backend == "normpass":
        assert "fused" in regions or (regions and "least_bytes" not in (options or {}))
    assert right.keys() <= found.keys()
    # What only other outputs depend on has a gradient of zeros when compiled, and none in eager.
    assert not any(found[name].any() for name in found.keys() - right.keys())
    least = SMALLEST * max(float(g.abs().max()) for g in right.values())
    return {
        name: float((found[name] - g).abs().max()) / max(float(g.abs().max()), least)
        for name, g in right.items()
    }


def wrong(errors: Mapping[str, float], tolerance: float = TOLERANCE) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error <= tolerance}


def gradients(call: Any, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of every parameter that takes part, for a fixed cotangent of the first output."""
    result = call(**inputs)
    first = result if isinstance(result, torch.Tensor) else result[0]
    model.zero_grad()
    first.backward((3 * torch.arange(first.numel(), dtype=first.dtype)).sin().view(first.shape))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert found
    return found


# --- diffusers ----------------------------------------------------------------------------------


def diffuser(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**config)
        return model

    return build


def image(channels: int, size: int) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


TIME = torch.tensor([3, 40])
DIFFUSERS = {
    "UNet2DConditionModel": Family(
        "diffusers",
        diffuser(
            "UNet2DConditionModel",
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            norm_num_groups=4,
            cross_attention_dim=12,
            attention_head_dim=4,
        ),
        lambda: {
            "sample": image(4, 8),
            "timestep": TIME,
            "encoder_hidden_states": torch.randn(BATCH, 5, 12),
            "return_dict": False,
        },
    ),
    "UNet2DModel": Family(
        "diffusers",
        diffuser(
            "UNet2DModel",
            sample_size=8,
            in_channels=3,
            out_channels=3,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
        ),
        lambda: {"sample": image(3, 8), "timestep": TIME, "return_dict": False},
    ),
    "AutoencoderKL": Family(
        "diffusers",
        diffuser(
            "AutoencoderKL",
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=16,
        ),
        lambda: {"sample": image(3, 16), "return_dict": False},
    ),
}

# --- transformers -------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "attention_dropout": 0.0,
}


def transformer(name: str, *, small: bool = True, **config: Any) -> Callable[[], nn.Module]:
    """A model from `<name>Config`, with SMALL's sizes if its fields have those names."""

    def build() -> nn.Module:
        import transformers

        fields = {**SMALL, **config} if small else config
        made = getattr(transformers, f"{name}Config")(**fields)
        return transformers.AutoModel.from_config(made, attn_implementation="eager")

    return build


def words() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH)), "return_dict": False}


def two_texts() -> dict[str, Any]:
    return {**words(), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, 7))}


def pixels() -> dict[str, Any]:
    return {"pixel_values": image(3, PIXELS), "return_dict": False}


def decoder(name: str, **config: Any) -> Family:
    return Family(
        "transformers",
        transformer(name, **{"use_cache": False, "pad_token_id": 0, **config}),
        words,
    )


def encoder(name: str, **config: Any) -> Family:
    return Family("transformers", transformer(name, pad_token_id=0, **config), words)


def vision(name: str, *, small: bool = True, **config: Any) -> Family:
    sizes = {"image_size": PIXELS, "patch_size": 8} if small else {}
    return Family("transformers", transformer(name, small=small, **{**sizes, **config}), pixels)


KEY_VALUE = {"num_key_value_heads": 2, "head_dim": 8}
TRANSFORMERS = {
    "Llama": decoder("Llama", num_key_value_heads=2),
    "Mistral": decoder("Mistral", **KEY_VALUE),
    "Qwen2": decoder("Qwen2", num_key_value_heads=2),
    "Qwen3": decoder("Qwen3", **KEY_VALUE),
    "Gemma": decoder("Gemma", **KEY_VALUE),
    "Gemma2": decoder("Gemma2", **KEY_VALUE),
    "Gemma3": decoder("Gemma3Text", **KEY_VALUE),
    "Phi": decoder("Phi"),
    "Phi3": decoder("Phi3", num_key_value_heads=2),
    "Olmo2": decoder("Olmo2"),
    "StableLm": decoder("StableLm", num_key_value_heads=4),
    "Cohere": decoder("Cohere", num_key_value_heads=4),
    "GPT2": decoder("GPT2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    "GPTNeoX": decoder("GPTNeoX"),
    "GPTJ": decoder("GPTJ", rotary_dim=4),
    "OPT": decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.0, dropout=0.0),
    "Bloom": decoder("Bloom"),
    "Falcon": decoder("Falcon"),
    "BERT": encoder("Bert"),
    "RoBERTa": encoder("Roberta", max_position_embeddings=64),
    "ELECTRA": encoder("Electra", embedding_size=16),
    "ALBERT": encoder("Albert", embedding_size=16),
    "DistilBERT": encoder("DistilBert", dim=32, hidden_dim=48, n_layers=2, n_heads=4),
    "T5": Family(
        "transformers",
        transformer(
            "T5",
            small=False,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            use_cache=False,
        ),
        two_texts,
    ),
    "BART": Family(
        "transformers",
        transformer(
            "Bart",
            small=False,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=VOCABULARY,
            dropout=0.0,
            use_cache=False,
        ),
        two_texts,
    ),
    "ViT": vision("ViT"),
    "DINOv2": vision("Dinov2"),
    "Swin": vision(
        "Swin",
        small=False,
        image_size=PIXELS,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "ConvNeXt": vision(
        "ConvNext",
        small=False,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
        drop_path_rate=0.0,
    ),
    "ResNet": vision(
        "ResNet",
        small=False,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    "Wav2Vec2": Family(
        "transformers",
        transformer(
            "Wav2Vec2",
            hidden_dropout=0.0,
            activation_dropout=0.0,
            layerdrop=0.0,
            feat_proj_dropout=0.0,
            mask_time_prob=0.0,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        ),
        lambda: {
            "input_values": torch.randn(BATCH, 400),
            "return_dict": False,
        },
    ),
}

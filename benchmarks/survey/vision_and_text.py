"""Kinds that read text beside images, or images and return text."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.survey.inputs import (
    SAMPLES,
    boxes,
    fixed,
    floats,
    ids,
    image,
    image_and_text,
    text,
    together,
    tokens_of_image,
)
from benchmarks.survey.kinds import Help, Kind, kind
from benchmarks.survey.tiny import SIZES

_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {**_TEXT, "model_type": "llama"}
_CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 32,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_VISION_TEXT: dict[str, Any] = {"text_config": _LLAMA, "image_token_id": 5}


def _target(model: Any) -> dict[str, Any]:
    return {"decoder_input_ids": ids(model, 5), "use_cache": False}


def _patches(model: Any, side: int = 4) -> dict[str, Any]:
    """Images as Qwen2-VL reads them: the patches of all samples as rows."""
    vision = model.config.vision_config
    size = vision.patch_size**2 * vision.temporal_patch_size * 3
    count = side * side
    merged = count // vision.spatial_merge_size**2
    given = ids(model, merged + 5)
    given[:, 2 : 2 + merged] = model.config.image_token_id
    kinds = (given == model.config.image_token_id).long()
    return {
        "input_ids": given,
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(SAMPLES * count, size),
        "image_grid_thw": torch.tensor([[1, side, side]] * SAMPLES),
    }


_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "mlp_ratio": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TEXT = {
    **_TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}

#: Similarities of all pairs are scaled by these; a loss of each sample's own outputs needs neither.
UNSCALED = Help("freeze `logit_scale`, `logit_bias`", frozen=("logit_scale", "logit_bias"))

#: Where an image's features lie is chosen by tokens, so what is behind them must be declared.
_FLAT = ["*.layers.*.fc1", "*.layers.*.fc2", "*.layers.*.final_layer_norm"]
OF_OPT = Help(f"`folded_modules={_FLAT}`".replace("'", '"'), {"folded_modules": _FLAT})

_CONTRASTIVE = """CLIPModel CLIPSegModel SiglipModel MetaClip2Model ChineseCLIPModel AltCLIPModel
Tipsv2Model Owlv2Model"""

MODELS: list[Kind] = [
    *(kind(name, image_and_text(), UNSCALED) for name in _CONTRASTIVE.split()),
    kind(
        "OwlViTForObjectDetection",
        together(image(), lambda m: {"input_ids": ids(m, 7).repeat_interleave(2, 0)}),
        Help(
            "freeze `owlvit.text_model`, `text_projection`, `logit_scale`",
            frozen=("owlvit.text_model.", "owlvit.text_projection.", "owlvit.logit_scale"),
        ),
    ),
    kind(
        "GroupViTModel",
        image_and_text(),
        UNSCALED,
        vision_config={
            **SIZES,
            "depths": [1, 1, 1],
            "num_group_tokens": [4, 2, 0],
            "num_output_groups": [4, 2, 2],
        },
    ),
    kind("BlipModel", image_and_text(), UNSCALED),
    kind("BlipForConditionalGeneration", image_and_text()),
    kind(
        "BlipForQuestionAnswering",
        together(image_and_text(), lambda m: {"decoder_input_ids": ids(m, 5)}),
    ),
    kind("BlipForImageTextRetrieval", image_and_text()),
    kind(
        "Blip2ForConditionalGeneration",
        tokens_of_image(5, 4),
        OF_OPT,
        num_query_tokens=4,
        image_token_index=5,
        vision_config={**_CLIP, "model_type": "blip_2_vision_model"},
        qformer_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "vocab_size": 40,
            "encoder_hidden_size": 32,
        },
        text_config={**_TEXT, "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    kind("GitForCausalLM", image_and_text()),
    kind("ViltForQuestionAnswering", image_and_text(), image_size=32, patch_size=8),
    kind(
        "VisualBertForPreTraining",
        together(
            text(),
            floats(visual_embeds=(4, 16)),
            fixed(visual_attention_mask=torch.ones(SAMPLES, 4)),
        ),
        visual_embedding_dim=16,
    ),
    kind(
        "LxmertModel",
        together(text(), floats(visual_feats=(4, 16), visual_pos=(4, 4))),
        visual_feat_dim=16,
        l_layers=1,
        r_layers=1,
        x_layers=1,
    ),
    kind("FlavaModel", image_and_text(), UNSCALED),
    kind(
        "LayoutLMv3ForSequenceClassification",
        together(image_and_text(), boxes()),
        input_size=32,
        patch_size=8,
        coordinate_size=6,
        shape_size=4,
        rel_pos_bins=4,
        max_rel_pos=8,
        rel_2d_pos_bins=4,
        max_rel_2d_pos=8,
        max_2d_position_embeddings=64,
    ),
    kind(
        "VisionEncoderDecoderModel",
        together(image(), _target),
        encoder={
            "model_type": "vit",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
        decoder={
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 40,
            "add_cross_attention": True,
            "is_decoder": True,
        },
    ),
    kind(
        "VisionEncoderDecoderModel",
        together(image(), _target),
        name="Donut (Swin and MBart)",
        encoder={
            "model_type": "donut-swin",
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        decoder={
            "model_type": "mbart",
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "vocab_size": 40,
            "add_cross_attention": True,
            "is_decoder": True,
        },
    ),
    kind(
        "SpeechEncoderDecoderModel",
        together(floats(input_values=(1200,)), _target),
        encoder={
            "model_type": "wav2vec2",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0),
            **dict.fromkeys(("feat_proj_dropout", "feat_extract_dropout"), 0.0),
        },
        decoder={
            "model_type": "bert",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "vocab_size": 40,
            "add_cross_attention": True,
            "is_decoder": True,
        },
    ),
    kind(
        "VisionTextDualEncoderModel",
        image_and_text(),
        UNSCALED,
        projection_dim=16,
        vision_config={**_CLIP},
        text_config={
            "model_type": "bert",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "vocab_size": 40,
        },
    ),
    kind(
        "LlavaForConditionalGeneration",
        tokens_of_image(5, 16),
        vision_config=_CLIP,
        image_token_index=5,
        vision_feature_layer=-1,
        text_config=_LLAMA,
    ),
    kind(
        "VipLlavaForConditionalGeneration",
        tokens_of_image(5, 16),
        vision_config=_CLIP,
        image_token_index=5,
        vision_feature_layers=[-1, -2],
        text_config=_LLAMA,
    ),
    kind(
        "PaliGemmaForConditionalGeneration",
        tokens_of_image(5, 16),
        vision_config=_SIGLIP,
        image_token_index=5,
        text_config={**_TEXT, "model_type": "gemma", "head_dim": 8},
    ),
    kind(
        "AyaVisionForConditionalGeneration",
        tokens_of_image(5, 4),
        vision_config=_SIGLIP,
        image_token_index=5,
        downsample_factor=2,
        vision_feature_layer=-1,
        text_config={**_TEXT, "model_type": "cohere2"},
    ),
    kind(
        "Gemma3ForConditionalGeneration",
        tokens_of_image(5, 4),
        vision_config=_SIGLIP,
        image_token_id=5,
        image_token_index=5,
        mm_tokens_per_image=4,
        text_config={**_TEXT, "model_type": "gemma3_text", "head_dim": 8},
    ),
    kind(
        "Idefics3ForConditionalGeneration",
        together(tokens_of_image(5, 4), floats(pixel_values=(1, 3, 32, 32))),
        Help('`mode="one_by_one"`', {"mode": "one_by_one"}),
        image_token_id=5,
        scale_factor=2,
        vision_config={**_CLIP, "model_type": "idefics3_vision"},
        text_config=_LLAMA,
    ),
    kind(
        "InternVLForConditionalGeneration",
        tokens_of_image(5, 4),
        image_token_id=5,
        vision_feature_layer=-1,
        vision_config={
            "model_type": "internvl_vision",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": [32, 32],
            "patch_size": [8, 8],
        },
        text_config={**_TEXT, "model_type": "qwen2"},
    ),
    kind(
        "Qwen2VLForConditionalGeneration",
        _patches,
        image_token_id=5,
        vision_start_token_id=3,
        vision_end_token_id=4,
        video_token_id=2,
        vision_config=_QWEN_VISION,
        text_config=_QWEN_TEXT,
    ),
    kind(
        "Qwen2_5_VLForConditionalGeneration",
        _patches,
        dtype=torch.float32,  # its norms compute in fp32, and have a rule in no wider dtype
        image_token_id=5,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
        text_config=_QWEN_TEXT,
        vision_config={
            **_QWEN_VISION,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    kind(
        "Qwen3VLForConditionalGeneration",
        _patches,
        dtype=torch.float32,
        image_token_id=5,
        video_token_id=2,
        vision_start_token_id=3,
        vision_end_token_id=4,
        text_config=_QWEN_TEXT,
        vision_config={
            **_QWEN_VISION,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    kind("Florence2ForConditionalGeneration", image_and_text()),
    kind("Kosmos2ForConditionalGeneration", image_and_text()),
    kind("PerceptionLMForConditionalGeneration", image_and_text()),
]

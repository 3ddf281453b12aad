"""Kinds that read images and videos."""

from __future__ import annotations

from typing import Any

from benchmarks.survey.inputs import floats, image, text, together, video
from benchmarks.survey.kinds import Help, Kind, each, kind

#: Windows of four patches, two stages.
_WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
PYRAMID: dict[str, Any] = {
    "image_size": 32,
    "num_encoder_blocks": 4,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 16, 32],
    "num_attention_heads": [1, 2, 2, 4],
    "mlp_ratios": [2, 2, 2, 2],
}
_VIT: dict[str, Any] = {"image_size": 32, "patch_size": 8}

IMAGES: list[Kind] = [
    *each(
        image(),
        """BeitForImageClassification CLIPForImageClassification
        Data2VecVisionForImageClassification
        DeiTForImageClassification Dinov2ForImageClassification
        Dinov2WithRegistersForImageClassification IJepaForImageClassification
        MetaClip2ForImageClassification SiglipForImageClassification ViTForImageClassification
        ViTMSNForImageClassification Aimv2VisionModel MLCDVisionModel PixioModel
        ViTForMaskedImageModeling""",
    ),
    *each(together(image(), floats(noise=(16,))), "ViTMAEModel ViTMAEForPreTraining"),
    kind("SwinForImageClassification", image(), **_WINDOWS),
    kind("Swinv2ForImageClassification", image(), **_WINDOWS),
    kind("DonutSwinForImageClassification", image(), **_WINDOWS),
    kind(
        "Swin2SRForImageSuperResolution",
        image(),
        image_size=32,
        patch_size=1,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        upscale=2,
    ),
    kind("ConvNextForImageClassification", image(32), **_STAGES),
    kind("ConvNextV2ForImageClassification", image(32), **_STAGES),
    kind("DINOv3ViTModel", image(32), pos_embed_rescale=None, **_VIT),  # drawn at random
    kind("DINOv3ConvNextModel", image(32), hidden_sizes=[16, 32], depths=[1, 1]),
    kind(
        "CvtForImageClassification",
        image(32),
        embed_dim=[16, 32, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 3],
        qkv_projection_method=["dw_bn"] * 3,
    ),
    kind(
        "CvtForImageClassification",
        image(32),
        name="Cvt, linear projections",
        embed_dim=[16, 32, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 3],
        qkv_projection_method=["linear"] * 3,
    ),
    kind(
        "BitForImageClassification",
        image(32),
        embedding_size=32,
        hidden_sizes=[32, 64],
        depths=[1, 1],
        num_groups=4,
    ),
    kind(
        "FocalNetForImageClassification",
        image(32),
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        hidden_sizes=[16, 32],
    ),
    kind(
        "HieraForImageClassification",
        image(32),
        image_size=[32, 32],
        patch_size=[4, 4],
        patch_stride=[4, 4],
        patch_padding=[0, 0],
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 4],
        num_query_pool=1,
        query_stride=[2, 2],
        masked_unit_size=[2, 2],
    ),
    kind("ImageGPTForImageClassification", text(9), n_positions=16),
    kind(
        "LevitForImageClassification",
        image(64),
        image_size=64,
        patch_size=16,
        hidden_sizes=[16, 32, 32],
        num_attention_heads=[2, 2, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        attention_ratio=[1, 1, 1],
        mlp_ratio=[2, 2, 2],
        down_ops=[["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 4, 2, 2, 2]],
    ),
    kind("MobileNetV1ForImageClassification", image(64), depth_multiplier=0.25),
    kind("MobileNetV2ForImageClassification", image(64), depth_multiplier=0.25),
    kind(
        "MobileViTForImageClassification",
        image(64),
        hidden_sizes=[16, 16, 16],
        neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 16],
        num_attention_heads=2,
        patch_size=2,
        image_size=64,
    ),
    kind(
        "MobileViTV2ForImageClassification",
        image(64),
        width_multiplier=0.25,
        patch_size=2,
        image_size=64,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[32, 32, 32],
    ),
    kind(
        "PoolFormerForImageClassification",
        image(64),
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        patch_size=7,
    ),
    kind(
        "PvtForImageClassification",
        image(32),
        patch_sizes=[4, 2, 2, 2],
        sequence_reduction_ratios=[4, 2, 2, 1],
        **PYRAMID,
    ),
    kind(
        "PvtV2ForImageClassification",
        image(32),
        sr_ratios=[4, 2, 2, 1],
        **{**PYRAMID, "image_size": 32},
    ),
    kind(
        "RegNetForImageClassification",
        image(64),
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        groups_width=8,
    ),
    kind(
        "ResNetForImageClassification",
        image(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
    ),
    kind(
        "SwiftFormerForImageClassification",
        image(64),
        depths=[1, 1, 1, 1],
        embed_dims=[8, 16, 16, 32],
        image_size=64,
    ),
    kind(
        "PerceiverForImageClassificationLearned",
        lambda _: {"inputs": image(16)(_)["pixel_values"]},
        image_size=16,
        num_latents=4,
        d_latents=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    ),
    kind(
        "TimesformerForVideoClassification",
        video(4),
        Help("freeze `timesformer.embeddings`", frozen=("timesformer.embeddings.",)),
        num_frames=4,
        **_VIT,
    ),
    kind("VideoMAEForVideoClassification", video(4), num_frames=4, **_VIT),
    kind(
        "VivitForVideoClassification", video(4), num_frames=4, tubelet_size=[2, 8, 8], image_size=32
    ),
    kind(
        "VJEPA2ForVideoClassification",
        video(4, name="pixel_values_videos"),
        frames_per_clip=4,
        crop_size=32,
        pred_hidden_size=16,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        num_pooler_layers=1,
        patch_size=8,
    ),
]

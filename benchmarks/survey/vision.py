"""Kinds that read images and videos."""

from __future__ import annotations

from typing import Any

from benchmarks.survey.inputs import image, text, video
from benchmarks.survey.kinds import Kind, each, kind

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
_PYRAMID: dict[str, Any] = {
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
        """BeitForImageClassification CLIPForImageClassification Data2VecVisionForImageClassification
        DeiTForImageClassification Dinov2ForImageClassification
        Dinov2WithRegistersForImageClassification DINOv3ViTModel IJepaForImageClassification
        MetaClip2ForImageClassification SiglipForImageClassification ViTForImageClassification
        ViTMSNForImageClassification Aimv2VisionModel MLCDVisionModel PixioModel
        ViTMAEModel ViTMAEForPreTraining ViTForMaskedImageModeling""",
    ),
    kind("SwinForImageClassification", image(), **_WINDOWS),
    kind("Swinv2ForImageClassification", image(), **_WINDOWS),
    kind("DonutSwinForImageClassification", image(), **_WINDOWS),
    kind("Swin2SRForImageSuperResolution", image(), image_size=32, patch_size=1, embed_dim=16,
         depths=[2, 2], num_heads=[2, 2], window_size=4, upscale=2),
    kind("ConvNextForImageClassification", image(32), **_STAGES),
    kind("ConvNextV2ForImageClassification", image(32), **_STAGES),
    kind("DINOv3ConvNextModel", image(32), **_STAGES),
    kind("CvtForImageClassification", image(32), embed_dim=[16, 32, 32], num_heads=[1, 2, 4],
         depth=[1, 1, 1], qkv_projection_method=["dw_bn"] * 3),
    kind("CvtForImageClassification", image(32), name="Cvt, linear projections",
         embed_dim=[16, 32, 32], num_heads=[1, 2, 4], depth=[1, 1, 1],
         qkv_projection_method=["linear"] * 3),
    kind("BitForImageClassification", image(32), embedding_size=32, hidden_sizes=[32, 64],
         depths=[1, 1], num_groups=4),
    kind("FocalNetForImageClassification", image(32), patch_size=4, embed_dim=16, depths=[1, 1],
         focal_levels=[2, 2], focal_windows=[3, 3], hidden_sizes=[16, 32]),
    kind("HieraForImageClassification", image(32), image_size=[32, 32], patch_size=[4, 4],
         patch_stride=[4, 4], patch_padding=[0, 0], embed_dim=16, depths=[1, 1], num_heads=[2, 4],
         num_query_pool=1, query_stride=[2, 2], masked_unit_size=[2, 2]),
    kind("ImageGPTForImageClassification", text(9), n_positions=16),
    kind("LevitForImageClassification", image(64), image_size=64, hidden_sizes=[16, 32, 32],
         num_attention_heads=[2, 2, 4], depths=[1, 1, 1], key_dim=[8, 8, 8],
         attention_ratio=[1, 1, 1], mlp_ratio=[2, 2, 2], down_ops=[
             ["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 4, 2, 2, 2]]),
    kind("MobileNetV1ForImageClassification", image(64), depth_multiplier=0.25),
    kind("MobileNetV2ForImageClassification", image(64), depth_multiplier=0.25),
    kind("MobileViTForImageClassification", image(64), hidden_sizes=[16, 16, 16],
         neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 16], num_attention_heads=2, patch_size=2,
         image_size=64),
    kind("MobileViTV2ForImageClassification", image(64), width_multiplier=0.25, patch_size=2,
         image_size=64, n_attn_blocks=[1, 1, 1], base_attn_unit_dims=[32, 32, 32]),
    kind("PoolFormerForImageClassification", image(64), hidden_sizes=[8, 16, 16, 32],
         depths=[1, 1, 1, 1], patch_size=7),
    kind("PvtForImageClassification", image(32), patch_sizes=[4, 2, 2, 2],
         sequence_reduction_ratios=[4, 2, 2, 1], **_PYRAMID),
    kind("PvtV2ForImageClassification", image(32), sr_ratios=[4, 2, 2, 1], **{
        **_PYRAMID, "image_size": 32}),
    kind("RegNetForImageClassification", image(32), embedding_size=8, hidden_sizes=[8, 8, 16, 16],
         depths=[1, 1, 1, 1], groups_width=8),
    kind("ResNetForImageClassification", image(32), embedding_size=8, hidden_sizes=[8, 16],
         depths=[1, 1]),
    kind("EfficientNetForImageClassification", image(64), width_coefficient=0.25,
         depth_coefficient=0.25, hidden_dim=64),
    kind("SwiftFormerForImageClassification", image(64), depths=[1, 1, 1, 1],
         embed_dims=[8, 16, 16, 32], image_size=64),
    kind("PerceiverForImageClassificationLearned", lambda _: {
        "inputs": image(16)(_)["pixel_values"]}, image_size=16, num_latents=4, d_latents=16,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2,
        num_cross_attention_heads=2),
    kind("TimesformerForVideoClassification", video(4), num_frames=4, **_VIT),
    kind("VideoMAEForVideoClassification", video(4), num_frames=4, **_VIT),
    kind("VivitForVideoClassification", video(4), num_frames=4, tubelet_size=[2, 8, 8],
         image_size=32),
    kind("VJEPA2ForVideoClassification", video(4, name="pixel_values_videos"), frames_per_clip=4,
         crop_size=32, pred_hidden_size=16, pred_num_attention_heads=2, pred_num_hidden_layers=1,
         num_pooler_layers=1, **{"patch_size": 8}),
]

_QUERIES: dict[str, Any] = {"num_queries": 5, "num_feature_levels": 3}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_RESNETS = {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]}
_DINO = {
    "model_type": "dinov2",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
    "apply_layernorm": False,
    "reshape_hidden_states": False,
}

DENSE: list[Kind] = [
    kind("DetrForObjectDetection", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=_RESNET),
    kind("DetrForSegmentation", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config={
             **_RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
    kind("ConditionalDetrForObjectDetection", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=_RESNET),
    kind("TableTransformerForObjectDetection", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=_RESNET),
    kind("DabDetrForObjectDetection", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=_RESNET),
    kind("DeformableDetrForObjectDetection", image(64), num_queries=5, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=_RESNETS,
         num_feature_levels=3),
    kind("RTDetrForObjectDetection", image(64), num_queries=5),
    kind("RTDetrV2ForObjectDetection", image(64), num_queries=5),
    kind("DFineForObjectDetection", image(64), num_queries=5),
    kind("LwDetrForObjectDetection", image(64), num_queries=5),
    kind("RfDetrForObjectDetection", image(64), num_queries=5),
    kind("YolosForObjectDetection", image(32), image_size=[32, 32], num_detection_tokens=5,
         patch_size=8),
    kind("MaskFormerForInstanceSegmentation", image(64), num_queries=5, fpn_feature_size=16,
         mask_feature_size=16, backbone_config={
             "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1],
             "num_heads": [2, 2, 2, 2], "window_size": 2, "patch_size": 2, "image_size": 64,
             "out_features": ["stage1", "stage2", "stage3", "stage4"]},
         decoder_config={"model_type": "detr", "d_model": 16, "decoder_layers": 2,
                         "encoder_layers": 1, "num_queries": 5, "decoder_attention_heads": 4,
                         "encoder_attention_heads": 4, "dropout": 0.0}),
    kind("Mask2FormerForUniversalSegmentation", image(64), num_queries=5, feature_size=16,
         mask_feature_size=16, hidden_dim=16, encoder_feedforward_dim=16, decoder_layers=2,
         dim_feedforward=16, backbone_config={
             "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1],
             "num_heads": [2, 2, 2, 2], "window_size": 2, "patch_size": 2, "image_size": 64,
             "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
    kind("EomtForUniversalSegmentation", image(32), image_size=32, patch_size=8, num_queries=5,
         num_blocks=1, num_upscale_blocks=1),
    kind("BeitForSemanticSegmentation", image(32), image_size=32, patch_size=8,
         num_hidden_layers=4, out_indices=[0, 1, 2, 3], pool_scales=[1, 2]),
    kind("Data2VecVisionForSemanticSegmentation", image(32), image_size=32, patch_size=8,
         num_hidden_layers=4, out_indices=[0, 1, 2, 3], pool_scales=[1, 2]),
    kind("DPTForSemanticSegmentation", image(32), image_size=32, patch_size=8,
         num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
         neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, backbone_config=None),
    kind("DPTForDepthEstimation", image(32), image_size=32, patch_size=8,
         num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
         neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, backbone_config=None),
    kind("SegformerForSemanticSegmentation", image(64), patch_sizes=[7, 3, 3, 3],
         sr_ratios=[4, 2, 2, 1], decoder_hidden_size=16, **_PYRAMID),
    kind("SegformerForImageClassification", image(64), patch_sizes=[7, 3, 3, 3],
         sr_ratios=[4, 2, 2, 1], decoder_hidden_size=16, **_PYRAMID),
    kind("GLPNForDepthEstimation", image(64), patch_sizes=[7, 3, 3, 3],
         sr_ratios=[4, 2, 2, 1], decoder_hidden_size=16, **_PYRAMID),
    kind("DepthAnythingForDepthEstimation", image(32), backbone_config=_DINO, patch_size=8,
         reassemble_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16,
         head_hidden_size=8),
    kind("MobileViTForSemanticSegmentation", image(64), hidden_sizes=[16, 16, 16],
         neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 16], num_attention_heads=2, patch_size=2,
         image_size=64, aspp_out_channels=16, atrous_rates=[1, 2, 3]),
    kind("UperNetForSemanticSegmentation", image(64), hidden_size=16, pool_scales=[1, 2],
         auxiliary_in_channels=32, auxiliary_channels=8, backbone_config={
             "model_type": "convnext", "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1],
             "num_stages": 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]}),
    kind("SamVisionModel", image(32), image_size=32, patch_size=8, output_channels=16,
         window_size=2, global_attn_indexes=[1], num_pos_feats=8, mlp_dim=48,
         num_hidden_layers=2),
    kind("VitDetModel", image(32), image_size=32, patch_size=8, window_block_indices=[0],
         window_size=2, use_relative_position_embeddings=True),
    kind("VitMatteForImageMatting", image(32, 4), hidden_size=32, backbone_config={
        "model_type": "vitdet", "num_channels": 4, "image_size": 32, "patch_size": 16,
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "out_features": ["stage2"]}, convstream_hidden_sizes=[8, 8, 8],
        fusion_hidden_sizes=[8, 8, 8, 8]),
    kind("VitPoseForPoseEstimation", image(32), num_labels=5, backbone_config={
        "model_type": "vitpose_backbone", "image_size": [32, 32], "patch_size": [8, 8],
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "out_indices": [2]}),
    kind("SuperPointForKeypointDetection", image(32), encoder_hidden_sizes=[8, 8, 16, 16],
         decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16),
    kind("TextNetForImageClassification", image(64)),
]

"""Kinds that read text."""

from __future__ import annotations

import torch

from benchmarks.survey.inputs import (
    SAMPLES,
    boxes,
    choices,
    ended,
    fixed,
    floats,
    text,
    text_to_text,
    together,
)
from benchmarks.survey.kinds import Kind, each, kind

_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
}

LANGUAGE: list[Kind] = [
    *each(
        text(),
        """ApertusForCausalLM ArceeForCausalLM BartForCausalLM BertLMHeadModel
        BertGenerationDecoder BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM
        BitNetForCausalLM BlenderbotForCausalLM BloomForCausalLM CohereForCausalLM
        Cohere2ForCausalLM CpmAntForCausalLM CTRLLMHeadModel DiffLlamaForCausalLM DogeForCausalLM
        Ernie4_5ForCausalLM Exaone4ForCausalLM FalconForCausalLM GemmaForCausalLM
        Gemma2ForCausalLM Gemma3ForCausalLM GlmForCausalLM Glm4ForCausalLM
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM
        GraniteForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM Jais2ForCausalLM
        LlamaForCausalLM MBartForCausalLM MinistralForCausalLM Ministral3ForCausalLM
        MistralForCausalLM ModernBertDecoderForCausalLM MptForCausalLM MvpForCausalLM
        NanoChatForCausalLM NemotronForCausalLM OlmoForCausalLM Olmo2ForCausalLM
        Olmo3ForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PersimmonForCausalLM PhiForCausalLM
        Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
        StableLmForCausalLM Starcoder2ForCausalLM TrOCRForCausalLM VaultGemmaForCausalLM
        XGLMForCausalLM ElectraForCausalLM RoFormerForCausalLM""",
    ),
    *each(text(), "MiniCPM3ForCausalLM YoutuForCausalLM", **_LATENT),
    *each(text(), "CodeGenForCausalLM GPTJForCausalLM", rotary_dim=4),
    kind("GPTNeoForCausalLM", text(), attention_types=[[["global", "local"], 1]]),
    kind("ProphetNetForCausalLM", text(), num_decoder_layers=2, num_decoder_attention_heads=4),
    kind("XLNetLMHeadModel", text(), d_inner=48, d_head=8),
    kind(
        "ReformerModelWithLMHead",
        text(16),
        is_decoder=True,
        axial_pos_embds=False,
        attn_layers=["local", "local"],
        attention_head_size=8,
        feed_forward_size=48,
    ),
    kind("LlamaForSequenceClassification", text(), pad_token_id=0),
    kind("GPT2ForSequenceClassification", text(), pad_token_id=0),
    kind("Gemma3TextModel", text()),
]

RECURRENT: list[Kind] = [
    kind("MambaForCausalLM", text(), state_size=4, time_step_rank=4),
    kind("FalconMambaForCausalLM", text(), state_size=4, time_step_rank=4),
    kind(
        "Mamba2ForCausalLM", text(), num_heads=8, head_dim=8, state_size=4, n_groups=2, chunk_size=4
    ),
    kind(
        "BambaForCausalLM",
        text(),
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_n_groups=2,
        mamba_chunk_size=4,
        attn_layer_indices=[1],
    ),
    kind(
        "FalconH1ForCausalLM",
        text(),
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_d_ssm=64,
        mamba_n_groups=2,
        mamba_chunk_size=4,
    ),
    kind(
        "Zamba2ForCausalLM",
        text(),
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=4,
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=4,
        num_mem_blocks=1,
        num_key_value_heads=4,
    ),
    kind(
        "RecurrentGemmaForCausalLM",
        text(),
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=8,
    ),
    kind("Lfm2ForCausalLM", text(), layer_types=["conv", "full_attention"]),
    kind("RwkvForCausalLM", text(), attention_hidden_size=32),
    kind("xLSTMForCausalLM", text(8), chunk_size=4, qk_dim_factor=0.5, v_dim_factor=1.0),
    kind("Olmo3ForCausalLM", text(), name="Olmo3, sliding windows", sliding_window=4),
]

ENCODERS: list[Kind] = [
    *each(
        text(),
        """AlbertForMaskedLM BertForMaskedLM BigBirdForMaskedLM CamembertForMaskedLM
        ConvBertForMaskedLM Data2VecTextForMaskedLM DebertaForMaskedLM DebertaV2ForMaskedLM
        DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM EsmForMaskedLM
        EuroBertForMaskedLM FlaubertWithLMHeadModel FNetForMaskedLM FunnelForMaskedLM
        MegatronBertForMaskedLM ModernBertForMaskedLM
        MPNetForMaskedLM NystromformerForMaskedLM RemBertForMaskedLM
        RobertaForMaskedLM RobertaPreLayerNormForMaskedLM RoFormerForMaskedLM
        SqueezeBertForMaskedLM XLMWithLMHeadModel XLMRobertaForMaskedLM XLMRobertaXLForMaskedLM
        JinaEmbeddingsV3ForMaskedLM NomicBertForMaskedLM""",
    ),
    kind(
        "MobileBertForMaskedLM",
        text(),
        embedding_size=16,
        intra_bottleneck_size=16,
        num_feedforward_networks=2,
        true_hidden_size=16,
        hidden_size=32,
    ),
    kind("IBertForMaskedLM", text()),
    kind("LongformerForMaskedLM", text(8), attention_window=4),
    kind("LukeForMaskedLM", text(), entity_vocab_size=9, entity_emb_size=16),
    kind("MraForMaskedLM", text(32), dtype=torch.float32, block_per_row=1),
    kind("YosoForMaskedLM", text(8), use_expectation=True),
    kind("XmodForMaskedLM", text(), default_language="en_XX"),
    kind("EsmcForMaskedLM", text(), num_key_value_heads=4),
    kind("RoCBertForMaskedLM", text(), pronunciation_vocab_size=40, shape_vocab_size=40),
    kind(
        "CanineForSequenceClassification",
        text(16),
        local_transformer_stride=8,
        downsampling_rate=4,
        num_hash_buckets=16,
        num_hash_functions=2,
    ),
    kind(
        "PerceiverForMaskedLM",
        text(8),
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        qk_channels=16,
        v_channels=16,
        max_position_embeddings=8,
    ),
    kind("BertForSequenceClassification", text()),
    kind("BertForTokenClassification", text()),
    kind("BertForQuestionAnswering", text()),
    kind("BertForMultipleChoice", choices()),
    kind("BertForPreTraining", text()),
    kind("RobertaForSequenceClassification", text()),
    kind("DebertaV2ForSequenceClassification", text()),
    kind(
        "DebertaV2ForSequenceClassification",
        text(),
        name="DebertaV2, relative positions",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        max_relative_positions=8,
    ),
    kind(
        "DebertaForSequenceClassification",
        text(),
        name="Deberta, relative positions",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=8,
    ),
    kind("XLNetForSequenceClassification", text(), d_inner=48, d_head=8),
    kind("DistilBertForSequenceClassification", text()),
    kind("ModernBertForSequenceClassification", text()),
    kind("SplinterForQuestionAnswering", text(), question_token_id=30),
    kind(
        "TapasForSequenceClassification",
        together(text(), fixed(token_type_ids=torch.zeros(SAMPLES, 7, 7, dtype=torch.long))),
    ),
    kind("LayoutLMForMaskedLM", together(text(), boxes())),
    kind(
        "MarkupLMForSequenceClassification",
        text(),
        max_depth=4,
        xpath_unit_hidden_size=8,
        max_xpath_tag_unit_embeddings=20,
        max_xpath_subs_unit_embeddings=20,
        tag_pad_id=5,
        subs_pad_id=5,
    ),
    kind("DPRQuestionEncoder", text()),
    kind("T5EncoderModel", text()),
    kind("MT5EncoderModel", text()),
    kind("UMT5EncoderModel", text()),
    kind("CLIPTextModelWithProjection", text()),
]

TEXT_TO_TEXT: list[Kind] = [
    *each(
        text_to_text(),
        """BartForConditionalGeneration BlenderbotForConditionalGeneration
        BlenderbotSmallForConditionalGeneration
        LongT5ForConditionalGeneration M2M100ForConditionalGeneration MarianMTModel
        MBartForConditionalGeneration MT5ForConditionalGeneration MvpForConditionalGeneration
        PegasusForConditionalGeneration PegasusXForConditionalGeneration
        PLBartForConditionalGeneration T5ForConditionalGeneration T5GemmaForConditionalGeneration
        UMT5ForConditionalGeneration BigBirdPegasusForConditionalGeneration""",
    ),
    kind("LEDForConditionalGeneration", text_to_text(8), attention_window=[4, 4]),
    kind(
        "FSMTForConditionalGeneration",
        text_to_text(),
        dtype=torch.float32,
        src_vocab_size=40,
        tgt_vocab_size=40,
        langs=["en", "de"],
    ),
    kind(
        "ProphetNetForConditionalGeneration",
        text_to_text(),
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
    ),
    kind(
        "BartForSequenceClassification",
        together(ended(), lambda model: {"decoder_input_ids": ended()(model)["input_ids"]}),
    ),
    kind(
        "T5ForConditionalGeneration",
        text_to_text(),
        name="T5 v1.1, untied",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    kind(
        "SeamlessM4TForTextToText",
        text_to_text(),
        speech_encoder_layers=1,
        encoder_layers=2,
        decoder_layers=2,
    ),
    kind(
        "UdopForConditionalGeneration",
        together(
            text_to_text(), fixed(bbox=torch.rand(SAMPLES, 7, 4)), floats(pixel_values=(3, 32, 32))
        ),
    ),
    kind(
        "BigBirdPegasusForConditionalGeneration",
        text_to_text(),
        name="BigBirdPegasus, blocks",
        attention_type="original_full",
    ),
]

#: Experts with a forward of their own; of the others see docs/mixtures.md.
EXPERTS: list[Kind] = [
    kind(
        "DbrxForCausalLM",
        text(),
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    ),
    kind("JetMoeForCausalLM", text(), kv_channels=8),
    kind(
        "Llama4ForCausalLM",
        text(),
        num_experts_per_tok=1,
        intermediate_size_mlp=48,
        interleave_moe_layer_step=1,
    ),
    kind(
        "SwitchTransformersForConditionalGeneration",
        text_to_text(),
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
    kind(
        "NllbMoeForConditionalGeneration",
        text_to_text(),
        encoder_sparse_step=1,
        decoder_sparse_step=1,
    ),
]

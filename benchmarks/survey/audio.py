"""Kinds that read sound, and series of numbers."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.survey.inputs import SAMPLES, fixed, floats, image, text, together, wave
from benchmarks.survey.kinds import Help, Kind, each, kind

#: Two convolutions over the wave instead of seven.
_WAVE: dict[str, Any] = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
_XVECTOR: dict[str, Any] = {
    **_WAVE,
    "tdnn_dim": [16, 16],
    "tdnn_kernel": [3, 3],
    "tdnn_dilation": [1, 1],
    "xvector_output_dim": 16,
}
#: Its attention hands parameters of its layers to one function, and returns biases of all heads.
_NO_ATTENTION = Help(
    "freeze all of `encoder.layers.*.attention`",
    frozen=tuple(f"wavlm.encoder.layers.{n}.attention." for n in range(2)),
)
_MEL = floats(input_features=(8, 32))

AUDIO: list[Kind] = [
    *each(
        wave(),
        """HubertForCTC UniSpeechForCTC UniSpeechSatForCTC Wav2Vec2ForCTC
        Wav2Vec2ConformerForCTC HubertForSequenceClassification
        Wav2Vec2ForSequenceClassification UniSpeechSatForSequenceClassification""",
        **_WAVE,
    ),
    kind("WavLMForCTC", wave(), _NO_ATTENTION, **_WAVE),
    kind("WavLMForSequenceClassification", wave(), _NO_ATTENTION, **_WAVE),
    kind("WavLMForXVector", wave(), _NO_ATTENTION, **_XVECTOR),
    *each(
        wave(),
        "Data2VecAudioForCTC Data2VecAudioForSequenceClassification",
        **{**_WAVE, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    ),
    *each(wave(), "SEWForCTC SEWForSequenceClassification", squeeze_factor=2, **_WAVE),
    *each(
        wave(),
        "SEWDForCTC SEWDForSequenceClassification",
        squeeze_factor=2,
        position_buckets=4,
        max_position_embeddings=16,
        **_WAVE,
    ),
    *each(
        wave(),
        "Wav2Vec2ForXVector UniSpeechSatForXVector Wav2Vec2ForAudioFrameClassification",
        **_XVECTOR,
    ),
    kind(
        "Wav2Vec2ForCTC",
        wave(),
        name="Wav2Vec2ForCTC, layer norm",
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        **_WAVE,
    ),
    kind("Wav2Vec2BertForCTC", floats(input_features=(20, 16)), feature_projection_input_dim=16),
    kind(
        "Wav2Vec2BertForSequenceClassification",
        floats(input_features=(20, 16)),
        feature_projection_input_dim=16,
    ),
    kind(
        "ASTForAudioClassification",
        floats(input_values=(32, 16)),
        max_length=32,
        num_mel_bins=16,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
    ),
    kind(
        "WhisperForConditionalGeneration",
        together(_MEL, fixed(decoder_input_ids=torch.randint(6, 40, (SAMPLES, 5)))),
        num_mel_bins=8,
        max_source_positions=16,
    ),
    kind(
        "WhisperForAudioClassification",
        _MEL,
        num_mel_bins=8,
        max_source_positions=16,
        classifier_proj_size=16,
    ),
    kind(
        "Speech2TextForConditionalGeneration",
        together(
            floats(input_features=(32, 8)),
            fixed(decoder_input_ids=torch.randint(6, 40, (SAMPLES, 5))),
        ),
        input_feat_per_channel=8,
        conv_channels=16,
        conv_kernel_sizes=[3, 3],
    ),
    kind(
        "MoonshineForConditionalGeneration",
        together(wave(4000), fixed(decoder_input_ids=torch.randint(6, 40, (SAMPLES, 5)))),
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    ),
    kind(
        "ParakeetForCTC",
        floats(input_features=(32, 8)),
        encoder_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_mel_bins": 8,
            "subsampling_conv_channels": 8,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "layerdrop": 0.0,
            "dropout_positions": 0.0,
        },
    ),
    kind(
        "LasrForCTC",
        floats(input_features=(32, 8)),
        encoder_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_mel_bins": 8,
            "subsampling_conv_channels": 16,
        },
    ),
    kind(
        "SpeechT5ForSpeechToText",
        together(wave(), fixed(decoder_input_ids=torch.randint(6, 40, (SAMPLES, 5)))),
        speech_decoder_prenet_units=16,
        **_WAVE,
    ),
    kind(
        "SpeechT5ForTextToSpeech",
        together(text(), floats(decoder_input_values=(6, 8), speaker_embeddings=(16,))),
        num_mel_bins=8,
        speaker_embedding_dim=16,
        speech_decoder_prenet_units=16,
        speech_decoder_postnet_units=16,
        speech_decoder_prenet_dropout=0.0,
    ),
    kind(
        "ClapAudioModelWithProjection",
        floats(input_features=(1, 64, 64)),
        spec_size=64,
        num_mel_bins=64,
        patch_embeds_hidden_size=16,
        depths=[1, 1],
        num_attention_heads=[2, 2],
        window_size=4,
        hidden_size=32,
        patch_size=4,
        patch_stride=[4, 4],
    ),
    kind(
        "EncodecModel",
        floats(input_values=(1, 640)),
        Help("DPLSTM in the place of LSTM (`ModuleValidator.fix(model)`)", replaces=True),
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=8,
        codebook_dim=16,
        num_residual_layers=1,
        num_lstm_layers=1,
    ),
    kind(
        "DacModel",
        floats(input_values=(1, 640)),
        encoder_hidden_size=8,
        hidden_size=16,
        downsampling_ratios=[2, 4],
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=8,
        codebook_dim=4,
        decoder_hidden_size=16,
    ),
    kind(
        "MusicgenForCausalLM",
        lambda _: {"input_ids": torch.randint(0, 40, (SAMPLES * 2, 7))},
        num_codebooks=2,
    ),
    kind(
        "MimiModel",
        floats(input_values=(1, 640)),
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=8,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=2,
        num_semantic_quantizers=1,
        upsample_groups=4,
    ),
]

_SERIES: dict[str, Any] = {"num_input_channels": 2, "context_length": 16, "patch_length": 4}
_PAST: dict[str, Any] = {
    "prediction_length": 3,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 2,
    "num_parallel_samples": 2,
}
_PAST_INPUTS = together(
    floats(
        past_values=(10,),
        past_time_features=(10, 2),
        future_values=(3,),
        future_time_features=(3, 2),
    ),
    fixed(past_observed_mask=torch.ones(SAMPLES, 10)),
)

SERIES: list[Kind] = [
    *each(
        floats(past_values=(16, 2)),
        "PatchTSTForPrediction PatchTSTForClassification PatchTSTForRegression",
        patch_stride=4,
        prediction_length=3,
        num_targets=3,
        pooling_type="mean",
        **_SERIES,
    ),
    *each(
        floats(past_values=(16, 2)),
        "PatchTSMixerForPrediction PatchTSMixerForTimeSeriesClassification "
        "PatchTSMixerForRegression",
        patch_stride=4,
        prediction_length=3,
        num_targets=3,
        norm_mlp="LayerNorm",
        **_SERIES,
    ),
    kind("TimeSeriesTransformerForPrediction", _PAST_INPUTS, **_PAST),
    kind("InformerForPrediction", _PAST_INPUTS, **_PAST),
    kind(
        "TimesFmModelForPrediction",
        together(floats(past_values=(32,)), fixed(freq=torch.zeros(SAMPLES, dtype=torch.long))),
        patch_length=8,
        context_length=32,
        horizon_length=8,
        quantiles=[0.5],
    ),
    kind(
        "DecisionTransformerModel",
        together(
            floats(states=(4, 5), actions=(4, 2), rewards=(4, 1), returns_to_go=(4, 1)),
            fixed(timesteps=torch.arange(4).repeat(SAMPLES, 1)),
        ),
        state_dim=5,
        act_dim=2,
        max_ep_len=9,
    ),
    kind("DepthProModel", image(32)),
]

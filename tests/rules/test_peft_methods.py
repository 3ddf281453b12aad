"""Every method of PEFT that ``docs/peft.md`` lists, against one sample at a time in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.errors import raises

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from flash_clipping import GradSampleModuleFlashClipping, per_sample_loss
from tests.support.autograd import check_by_autograd

pytestmark = pytest.mark.without_gate

T = 5
LAYERS = ["q_proj", "v_proj"]
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

#: By the names of ``docs/peft.md``: the class of a config, and its arguments.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("Lora", {"r": 2, "target_modules": [*LAYERS, "embed_tokens"]}),
    "DoRA": ("Lora", {"r": 2, "target_modules": LAYERS, "use_dora": True}),
    "IA3": ("IA3", {"target_modules": [*LAYERS, "out_proj"], "feedforward_modules": ["out_proj"]}),
    "AdaLoRA": ("AdaLora", dict(init_r=4, target_r=2, total_step=10, target_modules=LAYERS)),
    "prefix tuning": ("PrefixTuning", CAUSAL),
    "prefix tuning, projected": (
        "PrefixTuning",
        CAUSAL | {"prefix_projection": True, "encoder_hidden_size": 6},
    ),
    "prompt tuning": ("PromptTuning", CAUSAL),
    "p-tuning": ("PromptEncoder", CAUSAL | {"encoder_hidden_size": 6}),
    "VeRA": ("Vera", {"r": 2, "target_modules": LAYERS}),
    "LoHa": ("LoHa", {"r": 2, "target_modules": LAYERS}),
    "LoKr": ("LoKr", {"r": 2, "target_modules": LAYERS}),
    "OFT": ("OFT", {"r": 0, "oft_block_size": 4, "target_modules": LAYERS}),
    "BOFT": ("BOFT", {"boft_block_size": 4, "target_modules": ["q_proj"]}),
    "LayerNorm tuning": (
        "LNTuning",
        {"task_type": "CAUSAL_LM", "target_modules": ["self_attn_layer_norm"]},
    ),
    "trainable tokens": (
        "TrainableTokens",
        {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
    ),
}


def adapted(method: str, **more: Any) -> Any:
    """A small OPT, which computes in float64 throughout, with adapters that are no longer zero."""
    config = transformers.OPTConfig(
        vocab_size=17,
        hidden_size=8,
        ffn_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=8,
        max_position_embeddings=16,
        dropout=0.0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    kind, arguments = METHODS[method]
    of_method = getattr(peft, f"{kind}Config")(**arguments | more)
    model = peft.get_peft_model(transformers.OPTForCausalLM(config), of_method).double().train()
    for param in model.parameters():
        if param.requires_grad:
            param.data += 0.3 * torch.randn_like(param)
    return model


def tokens() -> Tensor:
    return torch.randint(3, 17, (3, T)).index_fill_(1, torch.tensor([0]), 1)


def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    (ids,) = batch
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -T:-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("method", METHODS)
def test_method_of_peft_matches_autograd(method: str) -> None:
    mode = "two_pass" if method in ("DoRA", "IA3", "prompt tuning") else "one_pass"
    if method in ("LoHa", "OFT"):  # whose parameters no stand-in can follow
        mode = "one_by_one"
        with raises("FC140", match='mode="one_by_one"'):
            loss(GradSampleModuleFlashClipping(adapted(method)), (tokens(),))
    check_by_autograd(adapted(method), (tokens(),), loss, mode=mode, steps=1)


@pytest.mark.parametrize("method", ["LoRA", "prompt tuning"])
def test_labels_of_different_lengths(method: str) -> None:
    """The loss of the model inside, called through PEFT; virtual tokens have no labels."""
    more = {} if method == "prompt tuning" else {"task_type": "CAUSAL_LM"}
    model, ids = adapted(method, **more), tokens()
    labels = ids.clone()
    labels[0, 2:] = -100
    virtual = 3 if method == "prompt tuning" else 0
    padded = F.pad(labels, (virtual, 0), value=-100)
    wrapped = GradSampleModuleFlashClipping(model)
    norms = []
    for own in (True, False):
        wrapped.zero_grad()
        output = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
        losses = per_sample_loss(output.logits.float(), padded, shift=True)
        (output.loss if own else losses.mean()).backward()
        norms.append(wrapped.get_norm_sample())
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0.0)


def test_the_loss_of_adalora_is_refused() -> None:
    wrapped = GradSampleModuleFlashClipping(adapted("AdaLoRA", task_type="CAUSAL_LM"))
    ids = tokens()
    with raises("FC443", match=r"\n.*\n.*shift=True"):
        wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    output = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids))
    per_sample_loss(output, ids, shift=True).mean().backward()
    assert wrapped.get_norm_sample().shape == (3,)


def test_an_lstm_of_p_tuning_is_refused() -> None:
    with raises("FC110", NotImplementedError, match=r"lstm_head \(LSTM\).*DPLSTM"):
        model = adapted("p-tuning", encoder_reparameterization_type="LSTM")
        GradSampleModuleFlashClipping(model)


def test_adapters_are_saved_and_generate(tmp_path: Any) -> None:
    wrapped = GradSampleModuleFlashClipping(adapted("LoRA", task_type="CAUSAL_LM").eval())
    wrapped.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert wrapped.active_adapter == "default"
    ids = tokens()
    assert wrapped.generate(input_ids=ids, max_new_tokens=2, pad_token_id=0).shape == (3, T + 2)

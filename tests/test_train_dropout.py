"""`disable_dropout` on families whose layers read a probability from an attribute, under many names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import train_kit as kit

from agentrl.train import setup

GPT: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
EAGER = {"attn_implementation": "eager"}
DROPOUT: list[tuple[str, dict[str, Any]]] = [
    ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.0}),
    ("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.5}),
    ("Bloom", {**EAGER, "n_layer": 2, "n_head": 2, "hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ("XGLM", {**EAGER, "d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2, "dropout": 0.5,
              "attention_dropout": 0.5, "activation_dropout": 0.5, "layerdrop": 0.5}),
    ("BioGpt", {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5, "layerdrop": 0.5,
                "activation_dropout": 0.5}),
    ("Starcoder2", {"residual_dropout": 0.5, "embedding_dropout": 0.5, "attention_dropout": 0.5}),
    ("GPTBigCode", {**GPT, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ("GPTJ", {**EAGER, **GPT, "rotary_dim": 4, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ("Doge", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ("SeedOss", {"residual_dropout": 0.5, "attention_dropout": 0.5}),
    ("Phi3", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attention_dropout": 0.5, "pad_token_id": 0}),
    ("GPTNeoX", {"attention_dropout": 0.5, "hidden_dropout": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rates"), DROPOUT)
def test_silenced_models_give_the_same_numbers_twice_in_training_mode(kind: str, rates: dict[str, Any]):
    """Whole dropped layers included; the config, which is saved with the model, says so too."""
    model = kit.build(kind, **rates).train()

    def outputs() -> list[torch.Tensor]:
        out = []
        for seed in range(4):  # four, because a dropped layer may be the same one twice
            torch.manual_seed(seed)
            out.append(model(input_ids=torch.arange(5, 17)[None], use_cache=False).logits.detach())
        return out

    first, *others = outputs()
    assert not all(torch.equal(first, other) for other in others)
    setup.silence_dropout(model)
    first, *others = outputs()
    assert all(torch.equal(first, other) for other in others)
    kept = model.config.to_diff_dict()
    assert {name: value for name, value in kept.items() if name in rates and value == 0.5} == {}

"""Where attention or positions change with length, a row still gives what each of its sequences gives alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import train_kit as kit
import transformers
from test_train_rows import CPU, alone, gradient, items, some_loss, through

from agentrl.sampler.rope import rope_limit
from agentrl.sampler.transformers import TransformersSampler
from agentrl.train import probe
from agentrl.train.log_probs import PolicyForward, Wanted, router_loss_of
from agentrl.train.rows import make_row

CHUNKS: dict[str, Any] = {
    "intermediate_size_mlp": 32, "num_local_experts": 2, "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
LONG: dict[str, Any] = {
    "pad_token_id": 0, "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [3.0, 9.0, 20.0, 40.0],
    },
}  # fmt: skip
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
LENGTHS = ((12, 32), (70,), (33, 5), (41,))  # either side of 32, and on it


def llama4(chunk: int) -> Any:
    settings: dict[str, Any] = kit.COMMON | CHUNKS | {"attention_chunk_size": chunk, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(**settings)
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Llama4ForCausalLM(config).eval()


def each(make: Any, parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and gradient of every sequence by itself, each through a fresh copy: some models remember lengths."""
    model = make()
    values = [alone(copy.deepcopy(model), [s]) for item in parts for s in item.sequences]
    loss_of = torch.cat(values).detach().requires_grad_()
    slopes = torch.autograd.grad(some_loss(loss_of), loss_of)[0].split([len(v) for v in values])
    total: torch.Tensor | None = None
    sequences = [s for item in parts for s in item.sequences]
    for sequence, slope in zip(sequences, slopes, strict=True):
        one = copy.deepcopy(model)
        grad = gradient(one, (alone(one, [sequence]) * slope).sum())
        total = grad if total is None else total + grad
    assert total is not None
    return torch.cat(values).detach(), total


def check(make: Any, lengths: Any = LENGTHS, packs: bool | None = None) -> PolicyForward:
    """A row of `lengths` gives what its sequences give alone, the second time too, packed or padded."""
    parts = items(lengths)
    want, want_gradient = each(make, parts)
    model = make()
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert packs is None or policy.packs is packs
    for switched in dict.fromkeys((policy.packs, False)):
        policy.packs = switched
        for _ in range(2):
            out, got = through(policy, make_row(parts, CPU))
            torch.testing.assert_close(out.log_probs_N.detach(), want, atol=1e-4, rtol=1e-4)
            assert got is not None and (got - want_gradient).norm() <= 1e-4 * want_gradient.norm()
    policy.restore()
    return policy


# --- windows ---------------------------------------------------------------------------
@pytest.mark.parametrize("chunk", [6, 32])
def test_chunked_attention_is_not_packed_across_its_borders(chunk: int):
    """Llama 4: 32 is longer than a probe of 24 tokens."""
    check(lambda: llama4(chunk), packs=False)


def test_a_chunk_that_no_probe_fills_packs_only_rows_within_it(monkeypatch: pytest.MonkeyPatch):
    """The probe's cap is lowered from 600 tokens to 24."""
    probe_row = probe.probe_row

    def short(self: PolicyForward) -> Any:
        windows, config = {}, self.model.config
        for name in ("sliding_window", "attention_chunk_size"):
            windows[name] = getattr(config, name, None)
            setattr(config, name, None)
        try:
            return probe_row(self)
        finally:
            for name, value in windows.items():
                setattr(config, name, value)

    monkeypatch.setattr(probe, "probe_row", short)
    policy = check(lambda: llama4(32), packs=True)
    policy.packs = True
    assert policy._packed(make_row(items(((32,), (5,))), CPU))
    assert not policy._packed(make_row(items(((33,), (5,))), CPU))
    # a window that the attention layers name themselves is packed at any length
    policy = check(lambda: kit.build("Mistral", sliding_window=32), packs=True)
    policy.packs = True
    assert policy._packed(make_row(items(((70,), (5,))), CPU))


def test_a_mask_of_the_models_own_is_never_ignored():
    """One that is made for long sequences only, as sparse attention makes it: a probe cannot see it."""

    def make() -> Any:
        model = kit.build("Qwen3")

        def mask(module: Any, args: Any, kwargs: Any) -> Any:
            length = kwargs["hidden_states"].shape[1]
            if length < 120:
                return None
            at = torch.arange(length)
            near = (at[:, None] - at[None, :] < 20) & (at[:, None] >= at[None, :])
            given = kwargs["attention_mask"]
            return args, kwargs | {"attention_mask": near[None, None] if given is None else given & near}

        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(mask, with_kwargs=True)
        return model

    model = make()
    policy = PolicyForward(model, 1.0)
    policy.probe()
    assert policy.packs
    parts = items(((70,), (64,)))
    row = make_row(parts, CPU)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # the backward pass runs the attention again
    out, got = through(policy, row)
    assert policy.packs is False and model.config._attn_implementation == "sdpa"
    want, want_gradient = each(make, parts)
    torch.testing.assert_close(out.log_probs_N.detach(), want, atol=1e-4, rtol=1e-4)
    assert got is not None and (got - want_gradient).norm() <= 1e-4 * want_gradient.norm()


# --- rotary positions ------------------------------------------------------------------
ROPES = [("Phi3", LONG), ("Llama", DYNAMIC), ("Qwen3Moe", {**MOE, **DYNAMIC}), ("Llama", LONG)]


@pytest.mark.parametrize(("kind", "changes"), ROPES)
def test_row_mates_do_not_change_the_positions_of_a_sequence(kind: str, changes: dict[str, Any]):
    check(lambda: kit.build(kind, **changes), packs=True)


def test_rows_within_the_limit_are_still_packed():
    policy = PolicyForward(kit.build("Phi3", **LONG), 1.0)
    policy.probe()
    assert policy._packed(make_row(items(((32,), (9, 12))), CPU))
    assert not policy._packed(make_row(items(((33,), (9, 12))), CPU))


def test_the_router_loss_is_that_of_all_tokens_of_the_row():
    """Of sequences that run one at a time: the mean of their losses is another number."""
    model = kit.build("Qwen3Moe", **MOE, **DYNAMIC)
    balance = router_loss_of(model)
    assert balance is not None
    parts = items(LENGTHS)
    layers = []
    for s in (s for item in parts for s in item.sequences):
        fresh = copy.deepcopy(model)
        layers.append(fresh(input_ids=torch.tensor([s.input_ids]), output_router_logits=True).router_logits)
    want = balance(tuple(torch.cat(layer) for layer in zip(*layers, strict=True)))
    assert (want - torch.stack([balance(one) for one in layers]).mean()).abs() > 1e-3
    policy = PolicyForward(model, 1.0)
    policy.probe()
    row = make_row(parts, CPU)
    with policy.context(row):
        got = policy.run(row, Wanted(router_loss=True)).router_loss
    assert got is not None
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_the_limit_is_read_from_every_form_of_a_config():
    def limit(**values: Any) -> int | None:
        return rope_limit(type("Config", (), {"max_position_embeddings": 900, **values})())

    long, dynamic = {"rope_type": "longrope", "original_max_position_embeddings": 40}, {"type": "dynamic"}
    assert limit() is None and limit(rope_parameters={"rope_type": "yarn"}) is None
    assert limit(rope_parameters=long) == 40
    assert limit(rope_scaling={"type": "su"}, original_max_position_embeddings=50) == 50
    assert limit(rope_scaling=dynamic) == 900
    assert limit(rope_parameters={"full_attention": long, "sliding_attention": {"rope_type": "default"}}) == 40
    assert limit(rope_parameters={"full_attention": dynamic, "sliding_attention": long}) == 40


@pytest.mark.parametrize(("kind", "changes"), [("Phi3", LONG), ("Llama", DYNAMIC)])
def test_the_sampler_stays_within_the_limit(kind: str, changes: dict[str, Any]):
    """So its log-probs, too, depend on no batch mate."""
    assert TransformersSampler(kit.build(kind, **changes)).runner.context == 32

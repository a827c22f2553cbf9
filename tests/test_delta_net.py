"""Layers whose state runs along the row: a tree row gives what one sample at a time gives."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from agentrl.train import delta_net
from agentrl.train.delta_net import DeltaLayout, delta_running, has_delta_layers
from agentrl.train.log_probs import PolicyForward
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import TrainingSequence

VOCABULARY = 61
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STATE: dict[str, Any] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED: dict[str, Any] = EXPERTS | {"shared_expert_intermediate_size": 16}
MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.5,
}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
SHORT: dict[str, Any] = {"conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"]}

MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_next": lambda: hf.Qwen3NextForCausalLM(
        hf.Qwen3NextConfig(**SIZES, **STATE, **SHARED, linear_num_value_heads=4, head_dim=8)
    ),
    "qwen3_5": lambda: hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(**SIZES, **STATE, linear_num_value_heads=4, head_dim=8, rope_parameters=MROPE)
    ),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeForCausalLM(
        hf.Qwen3_5MoeTextConfig(**SIZES, **STATE, **SHARED, linear_num_value_heads=4, head_dim=8, rope_parameters=MROPE)
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridForCausalLM(hf.OlmoHybridConfig(**SIZES, **STATE, linear_num_value_heads=2)),
    "kimi_linear": lambda: hf.KimiLinearForCausalLM(hf.KimiLinearConfig(**SIZES | KIMI)),
    "lfm2": lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SIZES, **SHORT, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": lambda: hf.Lfm2MoeForCausalLM(hf.Lfm2MoeConfig(**SIZES, **SHORT, **EXPERTS, num_dense_layers=1)),
}
_made: dict[str, Any] = {}


def tiny(name: str) -> Any:
    """A model in eval mode, with weights so large that each layer matters and decays so weak that states last.

    What comes out for a first token is (q k) v, and then normed: with an eps of 1e-6 a q k near 0 makes rounding errors
    of any size, in the plain model too.
    """
    if name not in _made:
        torch.manual_seed(7)
        model = MODELS[name]()
        with torch.no_grad():
            for at, p in model.named_parameters():
                if at.endswith("A_log"):
                    p.uniform_(-3.0, -1.0)
                elif p.dim() > 1:
                    p.normal_(std=0.4 if "conv" in at else 0.12)
        for module in model.modules():
            for eps in ("eps", "variance_epsilon"):
                if hasattr(module, eps):
                    setattr(module, eps, 1e-2)
        _made[name] = model.eval()
    model = _made[name]
    model.zero_grad(set_to_none=True)
    return model


@st.composite
def trees(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and parents in depth-first order: a segment continues one on the path to the one before it, or none."""
    parents: list[int] = []
    for s in range(draw(st.integers(1, 7))):
        path = [-1]
        at = s - 1
        while at >= 0:
            path.append(at)
            at = parents[at]
        parents.append(draw(st.sampled_from(path)))
    lengths = [draw(st.sampled_from([1, 1, 2, 3, 5, 9, 70])) for _ in parents]
    return tuple(lengths), tuple(parents)


def paths(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[Tensor]:
    """For each segment the places in the row of the tokens on its root path, itself included."""
    starts = [0, *itertools.accumulate(lengths)]
    made: list[Tensor] = []
    for s, parent in enumerate(parents):
        own = torch.arange(starts[s], starts[s + 1])
        made.append(torch.cat([made[parent], own]) if parent >= 0 else own)
    return made


def tree_inputs(lengths: tuple[int, ...], parents: tuple[int, ...]) -> dict[str, Tensor]:
    """Positions and a dense mask for the layers that attend."""
    total = sum(lengths)
    mask, positions = torch.zeros(total, total, dtype=torch.bool), torch.empty(total, dtype=torch.long)
    for path, length in zip(paths(lengths, parents), lengths, strict=True):
        for i in range(len(path) - length, len(path)):
            mask[path[i], path[: i + 1]] = True
            positions[path[i]] = i
    return {"attention_mask": mask[None, None], "position_ids": positions[None]}


def tokens(lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> dict[str, Tensor]:
    made = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return made


def one_at_a_time(
    model: Any, ids: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the row's tokens and gradients, each path by itself through the plain model."""
    rows: dict[int, Tensor] = {}
    for s, path in enumerate(paths(lengths, parents)):
        if s not in parents:  # a leaf
            logits = model(ids[path][None], use_cache=False).logits[0]
            rows |= {int(at): logits[i] for i, at in enumerate(path) if int(at) not in rows}
    logits = torch.stack([rows[at] for at in range(len(ids))])
    (logits * weights(logits)).sum().backward()
    return logits.detach(), gradients(model)


def weights(logits: Tensor) -> Tensor:
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))


def as_a_tree(
    model: Any, ids: Tensor, lengths: tuple[int, ...], parents: tuple[int, ...]
) -> tuple[Tensor, dict[str, Tensor]]:
    with delta_running(model, DeltaLayout.of(lengths, parents, ids.device)):
        logits = model(ids[None], **tree_inputs(lengths, parents), use_cache=False).logits[0]
        (logits * weights(logits)).sum().backward()
    return logits.detach(), gradients(model)


def off(a: Tensor, b: Tensor, least: float = 1e-30) -> float:
    """Largest difference, as a part of the largest value."""
    return (a - b).abs().max().item() / max(a.abs().max().item(), least)


def worst(model: Any, lengths: tuple[int, ...], parents: tuple[int, ...]) -> float:
    """How far the tree row is off, in logits and in the gradients of any parameter."""
    ids = tokens(lengths)
    logits, expected = one_at_a_time(model, ids, lengths, parents)
    ours, got = as_a_tree(model, ids, lengths, parents)
    assert got.keys() == expected.keys()
    largest = max(g.abs().max().item() for g in expected.values())
    seen = [off(expected[k], got[k], 1e-3 * largest) for k in expected]  # others are rounding errors that cancel
    return max(off(logits, ours), *seen)


# a root of one token, a child shorter than the kernel, grandchildren that see through it, a second root
FORKED = ((1, 2, 1, 5, 70, 3, 9), (-1, 0, 1, 1, 0, -1, 5))


@pytest.mark.parametrize("name", MODELS)
def test_a_tree_row_gives_what_one_sample_at_a_time_gives(name: str):
    model = tiny(name)
    assert has_delta_layers(model)

    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(trees())
    def holds(tree: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        assert worst(model, *tree) <= 1e-4

    holds()
    assert worst(model, *FORKED) <= 1e-4


def test_plain_packing_is_the_tree_where_nothing_is_shared():
    for name in ("qwen3_next", "kimi_linear", "lfm2"):
        assert worst(tiny(name), (3, 1, 66, 2), (-1,) * 4) <= 1e-4
        assert worst(tiny(name), (5,), (-1,)) <= 1e-4


def test_a_change_in_one_branch_changes_nothing_in_its_sibling_and_all_behind_itself():
    lengths, parents = FORKED
    changed = paths(lengths, parents)[2][-1:]  # segment 2: the one token whose child is segment 3
    behind = torch.zeros(sum(lengths), dtype=torch.bool)
    behind[[int(changed), *range(sum(lengths[:3]), sum(lengths[:3]) + lengths[2])]] = True
    for name in MODELS:
        model, ids = tiny(name), tokens(lengths)
        other = ids.clone()
        other[changed] = (ids[changed] + 1 - 3) % (VOCABULARY - 3) + 3
        moved = (as_a_tree(model, ids, lengths, parents)[0] - as_a_tree(model, other, lengths, parents)[0]).abs()
        inside = torch.tensor([bool(moved[i].max() > 0) for i in range(len(ids))])
        assert inside[changed].all() and not inside[~behind].any(), name


def test_a_change_in_the_root_reaches_every_branch_through_the_state():
    """Not through the attention layer: that one is left out, and the branches are longer than the convolutions."""
    model, lengths, parents = tiny("qwen3_next"), (9, 80, 80), (-1, 0, 0)
    ids = tokens(lengths)
    other = ids.clone()
    other[0] = ids[0] % (VOCABULARY - 4) + 4
    with torch.no_grad(), delta_running(model, DeltaLayout.of(lengths, parents, ids.device)):
        layer, embedded = model.model.layers[0].linear_attn, model.model.embed_tokens(torch.stack([ids, other]))
        one, two = layer(embedded[:1]), layer(embedded[1:])
    moved = (one - two)[0].abs().amax(-1)
    assert moved[20:89].min() > 0 and moved[100:].min() > 0


# --- ways of training ------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "lfm2"])
def test_gradient_checkpointing_recomputes_over_the_tree_even_in_another_thread(name: str):
    """CUDA runs the recomputation in autograd's own thread."""
    model, (lengths, parents) = tiny(name), FORKED
    ids = tokens(lengths)
    logits, expected = one_at_a_time(model, ids, lengths, parents)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        with delta_running(model, DeltaLayout.of(lengths, parents, ids.device)):
            ours = model(ids[None], **tree_inputs(lengths, parents), use_cache=False).logits[0]
            thread = threading.Thread(target=(ours * weights(ours)).sum().backward)
            thread.start()
            thread.join()
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    got = gradients(model)
    largest = max(g.abs().max().item() for g in expected.values())
    assert got.keys() == expected.keys() and off(logits, ours.detach()) <= 1e-4
    assert max(off(expected[k], got[k], 1e-3 * largest) for k in expected) <= 1e-4


def test_adapters_in_the_layers_are_trained_over_the_tree():
    torch.manual_seed(3)
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
    plain = MODELS["qwen3_next"]()
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    lengths, parents = FORKED
    ids = tokens(lengths)
    assert has_delta_layers(model)
    logits, expected = one_at_a_time(model, ids, lengths, parents)
    ours, got = as_a_tree(model, ids, lengths, parents)
    assert off(logits, ours) <= 1e-4 and expected.keys() == got.keys()
    assert all("lora" in k for k in got) and any("in_proj_ba" in k for k in got)
    largest = max(g.abs().max().item() for g in expected.values())
    assert max(off(expected[k], got[k], 1e-3 * largest) for k in expected) <= 1e-4


def test_bf16_is_as_close_over_the_tree_as_it_is_one_at_a_time():
    """States of parents are handed on in fp32."""
    model, (lengths, parents) = tiny("qwen3_5"), ((40, 30, 30, 20), (-1, 0, 1, 1))
    ids = tokens(lengths)
    exact, _ = one_at_a_time(model, ids, lengths, parents)
    half = MODELS["qwen3_5"]()
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16).eval()
    alone, _ = one_at_a_time(half, ids, lengths, parents)
    ours, _ = as_a_tree(half, ids, lengths, parents)
    assert (ours - exact).norm() <= 1.2 * (alone - exact).norm()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "lfm2"])
def test_the_policy_shares_beginnings_in_such_models_and_its_gradients_are_those_of_one_sample_at_a_time(name: str):
    """From the probe to the log-probs, attention layers and checkpointing included."""
    model, words = tiny(name), tokens((110,)).tolist()
    prompts = [words[:30], words[:30], [*words[:30], *words[60:70]], words[80:83]]
    answers = [words[30:45], words[45:47], words[70:75], words[83:99]]
    items = [
        TrainItem(n, (TrainingSequence([*a, *b], [False] * len(a) + [True] * len(b), [0.0] * len(a + b)),), 1.0, True)
        for n, (a, b) in enumerate(zip(prompts, answers, strict=True))
    ]
    policy = PolicyForward(model, 1.0)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        policy.probe()
        assert policy.packs and policy.least_shared is not None
        row = make_row(items, CPU, 1)
        assert row.shared and len(row.input_ids_T) == 30 + 15 + 2 + 10 + 5 + 19
        model.train()
        with policy.context(row):
            ours = policy.run(row).log_probs_N
            (ours * weights(ours)).sum().backward()
        got = gradients(model)
        policy.packs = False
        alone = torch.cat([policy.run(make_row([item], CPU, None)).log_probs_N for item in items])
        (alone * weights(alone)).sum().backward()
        expected = gradients(model)
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
        policy.restore()
    largest = max(g.abs().max().item() for g in expected.values())
    assert off(alone.detach(), ours.detach()) <= 1e-4 and got.keys() == expected.keys()
    assert max(off(expected[k], got[k], 1e-3 * largest) for k in expected) <= 1e-4


# --- what is touched -------------------------------------------------------------------
def test_outside_all_is_as_before_also_after_an_error():
    model = tiny("qwen3_next")
    layer = model.model.layers[0].linear_attn
    names = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")
    before = [getattr(modeling_qwen3_next, name) for name in names]
    with pytest.raises(RuntimeError, match="stop"), delta_running(model, DeltaLayout.of((2,), (-1,), CPU)):
        assert [getattr(modeling_qwen3_next, name) for name in names] != before
        raise RuntimeError("stop")
    assert [getattr(modeling_qwen3_next, name) for name in names] == before
    assert "forward" not in layer.__dict__ and delta_net._inside.layout is None


def test_inside_another_model_of_the_same_architecture_and_a_padded_batch_go_on_as_they_are():
    torch.manual_seed(5)
    model, other = tiny("qwen3_next"), MODELS["qwen3_next"]().eval()
    ids = tokens((8, 8)).view(2, 8)
    with torch.no_grad():
        alone = [m(ids, use_cache=False).logits for m in (model, other)] + [other(ids[:1], use_cache=False).logits]
        with delta_running(model, DeltaLayout.of((3, 5), (-1, -1), CPU)):
            inside = [m(ids, use_cache=False).logits for m in (model, other)] + [other(ids[:1], use_cache=False).logits]
    assert all(torch.equal(a, b) for a, b in zip(alone, inside, strict=True))


def test_a_model_in_another_thread_goes_on_as_it_is_while_a_layer_is_being_run():
    torch.manual_seed(5)
    model, other, ids = tiny("qwen3_next"), MODELS["qwen3_next"]().eval(), tokens((8,))[None]
    with torch.no_grad():
        alone = other(ids, use_cache=False).logits
    seen: list[Tensor] = []

    def meanwhile(*_: Any) -> None:
        with torch.no_grad():
            seen.append(other(ids, use_cache=False).logits)

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    handle = model.model.layers[0].linear_attn.in_proj_qkvz.register_forward_hook(elsewhere)
    try:
        with torch.no_grad(), delta_running(model, DeltaLayout.of((3, 5), (-1, -1), CPU)):
            model(ids, use_cache=False)
    finally:
        handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], alone)


def test_a_row_that_is_not_the_layouts_and_a_cache_are_refused():
    model = tiny("qwen3_next")
    with torch.no_grad(), delta_running(model, DeltaLayout.of((3, 5), (-1, 0), CPU)):
        with pytest.raises(ValueError, match="the row has 9 tokens, its layout 8"):
            model(tokens((16,))[None, :9], use_cache=False)
        with pytest.raises(ValueError, match="use_cache=False"):
            model(tokens((8,))[None], use_cache=True)


def test_two_contexts_one_in_the_other_use_the_inner_layout():
    model, ids = tiny("qwen3_next"), tokens((9,))
    expected, _ = as_a_tree(model, ids, (4, 5), (-1, 0))
    with delta_running(model, DeltaLayout.of((3, 6), (-1, -1), CPU)):
        assert torch.equal(as_a_tree(model, ids, (4, 5), (-1, 0))[0], expected)


def test_models_without_such_layers_are_left_alone():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    assert not has_delta_layers(model)
    with delta_running(model, DeltaLayout.of((2,), (-1,), CPU)):
        assert not any("forward" in module.__dict__ for module in model.modules())


SCAN: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
RECURRENT: dict[str, Any] = SIZES | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16}
OTHERS: dict[str, Callable[[], Any]] = {
    "Mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(**SCAN, state_size=4)),
    "Mamba2": lambda: hf.Mamba2ForCausalLM(
        hf.Mamba2Config(**SCAN, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=16)
    ),
    "RecurrentGemma": lambda: hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(**RECURRENT)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_recurrences_are_refused_by_name(name: str):
    model = OTHERS[name]()
    assert has_delta_layers(model)
    says = pytest.raises(ValueError, match=f"{name}.* has a recurrence that agentrl cannot run over a packed row")
    with says, delta_running(model, DeltaLayout.of((2,), (-1,), CPU)):
        pass
    assert not any("forward" in module.__dict__ for module in model.modules())


# --- layouts by hand -------------------------------------------------------------------
def test_windows_reach_past_short_parents_to_the_root_and_no_further():
    layout = DeltaLayout.of((2, 1, 1, 2), (-1, 0, 1, 0), CPU)  # tokens 0 1 | 2 | 3 | 4 5
    spread, empty, real = layout.windows(4)
    # fronts: none none none, none 0 1, 0 1 2, none 0 1; an empty place reads token 0 and is then zeroed
    assert spread.tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 2, 0, 1, 2, 3, 0, 0, 1, 4, 5]
    assert empty.tolist() == [0, 1, 2, 5, 13]
    assert real.tolist() == [3, 4, 8, 12, 16, 17]
    assert layout.windows(1)[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_segments_of_one_depth_lie_side_by_side_where_they_take_as_many_chunks():
    layout = DeltaLayout.of((2, 3, 60, 200, 1), (-1, 0, 0, 0, 3), CPU)
    shapes = [[tuple(bucket.index_SL.shape) for bucket in level] for level in layout.levels]
    assert shapes == [[(1, 2)], [(2, 60), (1, 200)], [(1, 1)]]
    small, large = layout.levels[1]
    assert small.index_SL[0].tolist() == [2, 3] + [4] * 58
    assert small.behind_SL is not None and small.behind_SL.sum(1).tolist() == [57, 0] and large.behind_SL is None
    (last,) = layout.levels[2]
    assert last.parents_S is not None and last.parents_S.tolist() == [2]  # the third of the level above
    flat = torch.cat([bucket.index_SL.reshape(-1) for level in layout.levels for bucket in level])
    assert flat[layout.inverse_T].tolist() == list(range(266))


@pytest.mark.parametrize(
    "lengths, parents", [((), ()), ((2, 0), (-1, 0)), ((2,), (-1, 0)), ((2, 2), (-1, 1)), ((1,), (-2,))]
)
def test_layouts_that_are_none(lengths: tuple[int, ...], parents: tuple[int, ...]):
    with pytest.raises(ValueError, match="segment"):
        DeltaLayout.of(lengths, parents, CPU)

"""Reward models beside reward functions: what they read, what they return, how they are named and loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit
from train_kit import judge
from transformers import BertConfig, BertForSequenceClassification

from agentrl.errors import ConfigurationError
from agentrl.train.reward_models import RewardModel, load_reward_models

PLAIN = [{"prompt": "Once"}, {"prompt": "Twice upon"}]
TALK = [{"prompt": [{"role": "user", "content": text}]} for text in ("Hello.", "And you?")]


def score_of(model: Any, text: str) -> float:
    """The model's score of one text alone."""
    ids = kit.tokenizer().encode(text, add_special_tokens=False)
    with torch.no_grad():
        states = model.model.eval()(input_ids=torch.tensor([ids])).last_hidden_state
        return model.score(states)[0, -1, 0].item()


def load(functions: Any, processing_classes: Any = None, **args: Any) -> list[Any]:
    return load_reward_models(functions, processing_classes, kit.config("unused", **args))


# --- what is scored --------------------------------------------------------------------
def test_a_batch_scores_what_each_text_alone_scores():
    """Of very different lengths, so that padding would show; plain texts are put end to end."""
    model = judge()
    (reward,) = load(model, kit.fresh_tokenizer())
    prompts, completions = ["a", "a longer prompt "], ["b" * 40, "c"]
    want = [score_of(model, p + c) for p, c in zip(prompts, completions, strict=True)]
    assert reward(prompts, completions) == pytest.approx(want, abs=1e-5)
    assert reward(prompts[1:], completions[1:]) == pytest.approx(want[1:], abs=1e-5)
    assert abs(want[0] - want[1]) > 0.01


def test_a_conversation_is_written_by_the_reward_models_own_template():
    model, tokenizer = judge(), kit.fresh_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    (reward,) = load(model, tokenizer)
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    completion = [{"role": "assistant", "content": "ho"}]
    want = score_of(model, "[system] be brief [user] hi [assistant] ho ")
    assert reward([prompt], [completion]) == pytest.approx([want], abs=1e-5)
    assert reward(["hi"], [completion]) == pytest.approx([score_of(model, "[user] hi [assistant] ho ")], abs=1e-5)
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match="has no chat template"):
        reward([prompt], [completion])


def test_the_pad_token_is_set_and_the_end_token_may_be_it():
    """Without a pad token the end token pads; a text that ends with it is scored at the token before, in any batch."""
    tokenizer = kit.fresh_tokenizer()
    tokenizer.pad_token = None
    model = judge()
    (reward,) = load(model, tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token and model.config.pad_token_id == tokenizer.eos_token_id
    alone = reward(["a"], ["b<|im_end|>"])
    assert reward(["a", "long" * 9], ["b<|im_end|>", "x"])[0] == pytest.approx(alone[0], abs=1e-5)
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="neither a pad nor an end token"):
        load(judge(), tokenizer)


def test_nothing_is_trained_and_dropout_is_off():
    model = judge(attention_dropout=0.5).train()
    (reward,) = load(model, kit.fresh_tokenizer())
    assert reward(["a"], ["bcd"]) == reward(["a"], ["bcd"])
    assert not model.training and all(p.grad is None for p in model.parameters())


def test_a_model_that_takes_segments_works_too():
    tokenizer = kit.fresh_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, num_labels=1,
    )  # fmt: skip
    (reward,) = load(BertForSequenceClassification(config), tokenizer)
    scores = reward(["a", "b"], ["c", "d" * 20])
    assert all(isinstance(score, float) for score in scores)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert reward(["a", "b"], ["c" * 40, "d" * 20]) == [None, pytest.approx(scores[1], abs=1e-5)]
        assert reward(["a"], ["c" * 50]) == [None]
    says = [str(w.message) for w in caught if "not scored" in str(w.message)]
    assert says == [
        "Reward model 'BertForSequenceClassification' sees 32 tokens; a prompt with its completion has 41 and is not "
        "scored by it (nor are later ones that are too long)."
    ]


def test_NaN_and_an_empty_text_are_not_scored(tmp_path: Path):
    model = judge()
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    (reward,) = load(model, kit.fresh_tokenizer())
    assert reward([""], [""]) == [None]
    rows = [*PLAIN, *PLAIN]
    made = kit.make(tmp_path, ["x"], reward_funcs=[reward, kit.length], train_dataset=rows)
    made.train()
    logs = made.state.log_history[0]
    assert logs["rewards/length/mean"] == logs["reward"] and f"rewards/{reward.__name__}/mean" not in logs
    made.close()


# --- in training -----------------------------------------------------------------------
async def later(completions: list[Any], log_extra: Any, log_metric: Any) -> list[float | None]:
    log_extra("first", [str(c)[:1] for c in completions])
    log_metric("judged", len(completions))
    return [None if i % 2 else 2.0 for i, _ in enumerate(completions)]


def test_models_functions_and_an_environment_together(tmp_path: Path):
    """A path, an instance, sync and async functions, None, and the environment's own reward: one weighted sum."""
    by_path, second = judge(1, tmp_path / "judges" / "tone"), judge(2)
    tok = kit.fresh_tokenizer()
    funcs = [str(tmp_path / "judges" / "tone"), kit.length, second, later, lambda completions: [1.0] * len(completions)]
    made = kit.make(
        tmp_path, lambda request: {"content": f"say {request.seed[-1]}"}, environment_factory=kit.Door,
        reward_funcs=funcs, reward_processing_classes=[None, kit.tokenizer(), tok, None, None],
        args={"reward_weights": [2.0, 1.0, 3.0, 0.5, 10.0]},
    )  # fmt: skip
    seen: list[Any] = []
    keep = made.played
    made.played = lambda groups, mode="train": (seen.extend(groups), keep(groups, mode))[1]
    made.train()
    made.close()
    names = ["Door", "tone", "length", "Qwen3ForSequenceClassification", "later", "lambda"]
    weights = [1.0, 2.0, 1.0, 3.0, 0.5, 10.0]
    assert len(seen) == 2
    for group in seen:
        for rollout in group.rollouts:
            assert list(rollout.rewards) == names
            values = [rollout.rewards[name] for name in names]
            assert rollout.reward == pytest.approx(
                sum(w * v for w, v in zip(weights, values, strict=True) if v is not None)
            )
            text = tok.apply_chat_template([*rollout.prompt, *rollout.completion], tokenize=False)
            assert values[1] == pytest.approx(score_of(by_path, text), abs=1e-5)
            assert values[3] == pytest.approx(score_of(second, text), abs=1e-5)
            assert rollout.extra["first"] == "["
        assert [r.rewards["later"] for r in group.rollouts] == [2.0, None, 2.0, None]
    logs = made.state.log_history[0]
    assert logs["judged"] == 4.0 and all(f"rewards/{name}/mean" in logs for name in names)


def test_two_models_of_one_name_have_two_metrics(tmp_path: Path):
    judge(1, tmp_path / "a" / "tone")
    judge(2, tmp_path / "b" / "tone")
    funcs = [str(tmp_path / "a" / "tone"), tmp_path / "b" / "tone"]
    made = kit.make(tmp_path, ["x"], reward_funcs=funcs, train_dataset=PLAIN)
    made.train()
    made.close()
    means = {name: value for name, value in made.state.log_history[0].items() if name.endswith("/mean")}
    assert set(means) == {"rewards/tone/mean", "rewards/tone_2/mean"} and len(set(means.values())) == 2


def test_a_reward_model_in_mixed_precision(tmp_path: Path):
    """Scores are fp32 numbers made in bf16; the weights stay as they are."""
    model = judge()
    want = [score_of(model, row["prompt"] + "x") for row in PLAIN]
    args = {"bf16": True, "use_cpu": True}
    made = kit.make(
        tmp_path, ["x"], reward_funcs=model, reward_processing_classes=kit.fresh_tokenizer(), train_dataset=PLAIN,
        args=args,
    )  # fmt: skip
    made.train()
    made.close()
    got = made.state.log_history[0]["reward"]
    assert got == pytest.approx(sum(want) / 2, abs=0.05) and got != sum(want) / 2
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [PLAIN, TALK], ids=["plain", "conversation"])
@pytest.mark.filterwarnings("ignore")
def test_the_scores_are_trls(tmp_path: Path, rows: list[dict[str, Any]]):
    """The same reward model by its path, the same completions: the same rewards."""
    trl = pytest.importorskip("trl", reason="the oracle of this test; pip install -e '.[dev]'")
    import datasets

    judge(3, tmp_path / "judge", initializer_range=0.5)
    kit.policy().save_pretrained(tmp_path / "m")
    ends = [[kit.tokenizer().encode("<|im_end|>")[0]], [], [40, 41, 42], [50] * 9]

    def answer(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        unique = [p for i, p in enumerate(prompts) if p not in prompts[:i]]
        ids = [[60 + i, *end] for i, _ in enumerate(unique) for end in ends]
        return {"prompt_ids": [[9]] * len(ids), "completion_ids": ids, "logprobs": [[-1.0] * len(i) for i in ids]}

    settings = {
        "output_dir": str(tmp_path / "t"), "use_cpu": True, "bf16": False, "max_steps": 1, "num_generations": 4,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "shuffle_dataset": False,
        "max_completion_length": 16, "gradient_checkpointing": False,
    }  # fmt: skip
    theirs = trl.GRPOTrainer(
        str(tmp_path / "m"), reward_funcs=str(tmp_path / "judge"), args=trl.GRPOConfig(**settings),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=kit.fresh_tokenizer(), rollout_func=answer,
    )  # fmt: skip
    theirs.train()
    ours = kit.make(
        tmp_path, reward_funcs=str(tmp_path / "judge"), train_dataset=rows, rollout_func=answer,
        processing_class=kit.fresh_tokenizer(),
    )  # fmt: skip
    ours.train()
    ours.close()
    names = ["rewards/judge/mean", "rewards/judge/std", "reward_std"]
    want = {name: theirs.state.log_history[0][name] for name in names}
    assert {name: ours.state.log_history[0][name] for name in names} == pytest.approx(want, rel=1e-4)
    assert want["reward_std"] > 1e-3


# --- what is refused -------------------------------------------------------------------
def test_numbers_of_tokenizers_that_do_not_fit():
    tok = kit.tokenizer()
    with pytest.raises(ConfigurationError, match="3 entries for 2 reward functions"):
        load([kit.length, judge()], [None, tok, tok])
    with pytest.raises(ConfigurationError, match="one tokenizer, but there are 2 reward functions"):
        load([kit.length, judge()], tok)
    assert load(None) == [] and load(kit.length, kit.tokenizer()) == [kit.length]
    assert isinstance(load([judge()], [kit.fresh_tokenizer()])[0], RewardModel)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: "./no/such/folder", "no folder './no/such/folder'"),
        (lambda: "accuracy_reward", "'accuracy_reward' is a function of agentrl.rewards"),
        (lambda: judge(labels=2), r"'Qwen3ForSequenceClassification' .* has 2 outputs"),
        (lambda: kit.policy(), "has 2 outputs; it must be a sequence-classification model with num_labels=1"),
        (lambda: judge(), "does not know where it was loaded from; pass its tokenizer in reward_processing_classes"),
    ],
)
def test_models_that_cannot_score_are_named(given: Any, says: str):
    with pytest.raises(ConfigurationError, match=says):
        load(given())


def test_a_causal_model_that_claims_one_label_is_named_when_it_scores():
    model = kit.policy()
    model.config.num_labels = 1
    (reward,) = load(model, kit.fresh_tokenizer())
    with pytest.raises(ConfigurationError, match=r"shape \(1, 2, \d+\) for 1 texts"):
        reward(["a"], ["b"])


def test_a_tokenizer_with_more_tokens_than_the_model_is_named():
    with pytest.raises(ConfigurationError, match="has 265 tokens but the model's embedding has 50"):
        load(judge(vocab_size=50), kit.fresh_tokenizer())


def test_a_folder_whose_score_layer_is_made_up_is_warned_about(tmp_path: Path) -> None:
    kit.policy().save_pretrained(tmp_path / "causal")
    kit.fresh_tokenizer().save_pretrained(tmp_path / "causal")
    with pytest.warns(UserWarning, match=r"causal' is no trained reward model.*score\.weight"):
        load(str(tmp_path / "causal"))
    judge().save_pretrained(tmp_path / "judge")
    kit.fresh_tokenizer().save_pretrained(tmp_path / "judge")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(str(tmp_path / "judge"))

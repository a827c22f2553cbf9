"""Turns that nobody sampled are written as the template of their conversation writes turns."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from agentrl import RandomPolicy, ScriptedSampler, play_episode
from agentrl.train.warm_up import random_episodes
from tests.families import FAMILIES, tokenizer

Place = Literal["cave", "mill", "lake"]


class Vault:
    """A vault that one place opens."""

    run_inline = True

    def reset(self, seed: int) -> str:
        self.open = 0.0
        self.looks = 0
        self.done = False
        return "Open the vault."

    def look(self, place: Place, times: int = 1) -> str:
        """Looks at a place.

        Args:
            place: Where.
            times: How often.
        """
        self.looks += 1
        self.done = self.looks == 3
        self.open = max(self.open, float(place == "mill"))
        return f"{place} seen {times} times"

    def get_reward(self) -> float:
        return self.open


def turn(place: str, **more: Any) -> dict[str, Any]:
    call = {"name": "look", "arguments": {"place": place, "times": 2}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]} | more


@pytest.mark.parametrize("family", FAMILIES)
def test_scripted_calls_are_run_in_every_family(family: str) -> None:
    tok = tokenizer(family)
    for extra in ({}, {"reasoning_content": "I look."}):
        script = ScriptedSampler([turn("lake", **extra), turn("mill", **extra), turn("cave", **extra)], tokenizer=tok)
        rollout = play_episode(Vault, script, tokenizer=tok)
        assert [call.arguments for call in rollout.tool_calls] == [
            {"place": place, "times": 2} for place in ("lake", "mill", "cave")
        ]
        assert rollout.reward == 1.0 and len(rollout.sequences) == 1


@pytest.mark.parametrize(
    "family", ["llama3_1", "qwen3_6", "glm4moe", "gptoss", "deepseek_v3", "gemma4", "lfm2", "qwen3"]
)
def test_random_episodes_call_tools_in_every_family(family: str) -> None:
    played = random_episodes(Vault, tokenizer(family), 12)
    assert all(len(rollout.tool_calls) == 3 for rollout in played)
    assert not any(call.error for rollout in played for call in rollout.tool_calls)
    # three of three places at random: 1 - (2/3)^3 = 0.70 of the episodes find the mill
    assert 3 <= sum(rollout.rewards["Vault"] == 1.0 for rollout in played) <= 12


def test_a_warm_up_uses_the_template_that_is_trained() -> None:
    tok = tokenizer("qwen3")
    text = tok.decode(
        random_episodes(Vault, tok, 1, chat_template_kwargs={"enable_thinking": False})[0].sequences[0].input_ids
    )
    assert text.count("<think>\n\n</think>\n\n") == 3
    original = random_episodes(Vault, tok, 2, chat_template="original")
    assert all(call.error is None for rollout in original for call in rollout.tool_calls)


def test_a_random_policy_writes_words_too() -> None:
    tok = tokenizer("gptoss")
    rollout = play_episode(Vault, RandomPolicy(stop_p=1.0, tokenizer=tok), tokenizer=tok)
    assert rollout.outcome.value == "finished" and rollout.messages[-1]["content"]

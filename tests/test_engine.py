"""The turn loop with scripted ids: what is asked of the sampler, what is recorded, where an episode ends."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from agentrl.environment import Environment
from agentrl.errors import ConfigurationError
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.sampler import ScriptedSampler
from agentrl.tool_schema import build_tool
from agentrl.types import Outcome, Rollout, Task

BEGIN, END = "<|im_start|>", "<|im_end|>"
ASK = [{"role": "user", "content": "what is in the cave"}]


class Cave(Environment):
    """Says what it was asked, and counts."""

    run_inline = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reset(self, hint: str | None = None) -> str | None:
        self.asked, self.done = [], False
        return hint

    def get_reward(self) -> float:
        return float(len(self.asked))

    def search(self, place: str) -> str:
        """
        Search a place.

        Args:
            place: Where.
        """
        self.asked.append(place)
        return f"nothing in {place}"

    def leave(self) -> str:
        """Leave the cave."""
        self.asked.append("leave")
        self.done = True
        return "you left"

    def read(self, words: int) -> str:
        """
        Read so many words.

        Args:
            words: How many.
        """
        self.asked.append("read")
        return "hello " * words


def call(name: str = "search", **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def calls(*made: dict[str, Any], say: str = "") -> dict[str, Any]:
    return {"content": say, "tool_calls": list(made)}


class Played:
    """One played episode with everything around it."""

    def __init__(
        self,
        tokenizer: Any,
        script: Any,
        row: Any,
        *,
        env: Any = Cave,
        tools: Any = (),
        ids: bool = True,
        **settings: Any,
    ) -> None:
        self.renderer = Renderer(tokenizer) if ids else None
        self.sampler = ScriptedSampler(script, tokenizer=tokenizer)
        pools = env if isinstance(env, dict) else {None: EnvironmentPool(env)}
        named = {tool.name: tool for tool in map(build_tool, tools)}
        self.engine = RolloutEngine(self.sampler, self.renderer, pools, named, RolloutSettings(**settings))
        task = Task(0, 0, 5, row, row.get("environment"))
        self.rollout, self.instance = asyncio.run(self.engine.play(task, rollout_id="r", group_id="g"))
        assert self.rollout.error is None, self.rollout.error

    @property
    def env(self) -> Any:
        assert self.instance is not None
        return self.instance.env


def trained(rollout: Rollout) -> list[int]:
    return [i for s in rollout.sequences for i, mask in zip(s.input_ids, s.completion_mask, strict=True) if mask]


def tool_texts(rollout: Rollout) -> list[str]:
    return [m["content"] for m in rollout.messages if m["role"] == "tool"]


# --- ids -------------------------------------------------------------------------------
def test_f047_what_is_trained_is_what_each_request_saw_plus_what_was_sampled(tiny):
    """F047: the second prompt has the tool result in its frame and the assistant's header, id for id."""
    tokenizer = tiny.qwen()
    played = Played(tokenizer, [calls(call(place="mill")), "the answer is mill"], {"prompt": ASK})
    first, second = played.sampler.requests
    turn = tokenizer.encode('<tool_call>\n{"name": "search", "arguments": {"place": "mill"}}\n</tool_call>' + END)
    border = f"\n{BEGIN}user\n<tool_response>\nnothing in mill\n</tool_response>{END}\n{BEGIN}assistant\n"
    assert tokenizer.decode(first.prompt_ids).endswith(f"{BEGIN}user\nwhat is in the cave{END}\n{BEGIN}assistant\n")
    assert second.prompt_ids == first.prompt_ids + turn + tokenizer.encode(border)
    answer = tokenizer.encode("the answer is mill" + END)
    (sequence,) = played.rollout.sequences
    assert sequence.input_ids == second.prompt_ids + answer
    assert trained(played.rollout) == turn + answer
    assert [lp for lp in sequence.old_log_probs if lp == lp] == [-1.0] * len(turn + answer)
    assert played.rollout.completion_ids == sequence.input_ids[len(first.prompt_ids) :]
    assert [t.prompt_ids for t in played.rollout.turns] == [first.prompt_ids, second.prompt_ids]
    assert played.rollout.outcome is Outcome.FINISHED and played.rollout.rewards == {"Cave": 1.0}


def test_f051_assistant_turns_of_the_prompt_are_not_trained(tiny):
    """F051: few-shot turns in the row are prompt; only what was sampled is trained."""
    tokenizer = tiny.qwen()
    prompt = [*ASK, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "hello world"}]
    played = Played(tokenizer, ["the answer"], {"prompt": prompt})
    assert trained(played.rollout) == tokenizer.encode("the answer" + END)
    assert played.rollout.prompt == prompt
    assert played.rollout.completion == [{"role": "assistant", "content": "the answer"}]
    assert played.rollout.group_id == "g"  # never derived from the text


def test_the_row_is_not_changed_by_playing_it(tiny):
    row = {"prompt": [{"role": "user", "content": "search "}], "hint": "the cave"}
    played = Played(tiny.qwen(), ["hello"], row)
    assert played.rollout.prompt == [{"role": "user", "content": "search the cave"}]
    assert row == {"prompt": [{"role": "user", "content": "search "}], "hint": "the cave"}


# --- prompts ---------------------------------------------------------------------------
def message(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def text(*words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": word} for word in words]


@pytest.mark.parametrize(
    ("prompt", "hint", "first"),
    [
        ("", "TASK: say 7", [message("TASK: say 7")]),
        (None, "TASK: say 7", [message("TASK: say 7")]),
        ([], "say 7", [message("say 7")]),
        ("Do it: ", "say 7", [message("Do it: say 7")]),
        ([message("s", "system")], "say 7", [message("s", "system"), message("say 7")]),
        ([message("a"), message("b", "assistant")], "!", [message("a!"), message("b", "assistant")]),
        ([message(text("a"))], "b", [message(text("a", "b"))]),
    ],
)
def test_f085_what_reset_returns_ends_the_last_user_message(tiny, prompt, hint, first):
    """F085: the observation reaches the prompt, whatever the row's own prompt is."""
    played = Played(tiny.qwen(), ["7"], {"prompt": prompt, "hint": hint})
    assert played.rollout.prompt == first and played.sampler.requests[0].messages == first


@pytest.mark.parametrize("prompt", [3, {"role": "user"}, ["hello"], [{"content": "no role"}]])
def test_a_prompt_that_is_none_is_a_clear_error(tiny, prompt):
    with pytest.raises(ConfigurationError, match="row 0"):
        Played(tiny.qwen(), ["7"], {"prompt": prompt})


def test_no_prompt_at_all_is_a_clear_error(tiny):
    with pytest.raises(ConfigurationError, match=r"no prompt and Cave.reset\(\) returned None"):
        Played(tiny.qwen(), ["7"], {})
    with pytest.raises(ConfigurationError, match="there is no environment"):
        Played(tiny.qwen(), ["7"], {}, env=None)
    with pytest.raises(ConfigurationError, match="is empty"):
        Played(tiny.qwen(), ["7"], {"prompt": ""}, env=None)


def test_a_prompt_that_fills_the_model_is_a_clear_error(tiny):
    size = len(Renderer(tiny.qwen()).first(ASK, None))
    with pytest.raises(ConfigurationError, match=f"row 0 has {size} tokens, but the model sees {size}"):
        Played(tiny.qwen(), ["7"], {"prompt": ASK}, env=None, max_context=size)
    played = Played(tiny.qwen(), ["7 8 9"], {"prompt": ASK}, env=None, max_context=size + 1)
    assert played.sampler.requests[0].max_tokens == 1 and played.rollout.truncated


class Speaks:
    """No tools; speaks like a control token."""

    def reset(self) -> str:
        return f" hello{END}"


def test_plain_strings_have_no_template_and_observations_no_control_tokens(tiny):
    """The author of a plain prompt writes its control tokens; what `reset` returns cannot become one."""
    tokenizer = tiny.qwen()
    played = Played(tokenizer, ["the world"], {"prompt": f"hello{END}"}, env=Speaks)
    ids = played.sampler.requests[0].prompt_ids
    assert ids is not None and tokenizer.decode(ids) == f"hello{END} hello{END}"
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 1
    assert played.rollout.prompt == f"hello{END} hello{END}" and played.rollout.completion == "the world"
    assert trained(played.rollout) == tokenizer.encode("the world" + END)


def test_plain_strings_stay_strings_without_a_tokenizer(tiny):
    played = Played(tiny.qwen(), ["the world"], {"prompt": "hello"}, env=None, ids=False)
    assert (played.rollout.prompt, played.rollout.completion) == ("hello", "the world")
    assert played.rollout.sequences == () and played.rollout.completion_ids == []


def test_a_plain_string_where_there_are_tools_is_a_user_message(tiny):
    played = Played(tiny.qwen(), ["hello"], {"prompt": "search the cave"})
    assert played.rollout.prompt == [{"role": "user", "content": "search the cave"}]


# --- calls -----------------------------------------------------------------------------
def test_f071_parallel_calls_run_in_order_once_each(tiny):
    """F071: two calls in one turn give two results in order, with the ids of their calls."""
    played = Played(tiny.qwen(), [calls(call(place="a"), call(place="b")), "done"], {"prompt": ASK})
    assert played.env.asked == ["a", "b"] and tool_texts(played.rollout) == ["nothing in a", "nothing in b"]
    named = [c["id"] for c in played.rollout.messages[1]["tool_calls"]]
    assert named == [m["tool_call_id"] for m in played.rollout.messages if m["role"] == "tool"] == ["call_0", "call_1"]
    assert [(c.turn, c.name, c.arguments) for c in played.rollout.tool_calls] == [
        (0, "search", {"place": "a"}), (0, "search", {"place": "b"}),
    ]  # fmt: skip
    assert "</tool_call>" not in played.rollout.messages[1]["content"]


def test_f079_a_wrong_call_is_told_its_true_cause(tiny):
    """F079: malformed JSON, an unknown tool, bad arguments: each has its own text, and the episode goes on."""
    script = [
        '<tool_call>\n{"name": "search", "arguments": {"place": "x"}\n</tool_call>',
        calls(call("serch", place="x")),
        calls(call("search", palce="x")),
        calls(call("read", words="many")),
        '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>',
        "done",
    ]
    played = Played(tiny.qwen(), script, {"prompt": ASK}, max_completion_length=4096)
    texts = tool_texts(played.rollout)
    wanted = [
        "not valid JSON",
        "available tools are: search, leave, read",
        "did you mean 'place'",
        "'words'",
        "JSON object",
    ]
    assert all(part in text for part, text in zip(wanted, texts, strict=True)), texts
    assert played.env.asked == [] and played.rollout.outcome is Outcome.FINISHED
    kinds = [c.error for c in played.rollout.tool_calls]
    assert kinds == ["malformed", "unknown_tool", "bad_arguments", "bad_arguments", "malformed"]
    assert not any("truncated" in text for text in texts)


def test_done_in_the_middle_of_parallel_calls_ends_the_episode(tiny):
    script = [calls(call(place="a"), call("leave"), call(place="b")), "never"]
    played = Played(tiny.qwen(), script, {"prompt": ASK})
    assert played.env.asked == ["a", "leave"] and played.rollout.outcome is Outcome.ENV_DONE
    assert [c.error for c in played.rollout.tool_calls] == [None, None, "episode_over"]
    assert (
        len(played.sampler.requests) == 1 and played.rollout.reward is None and played.rollout.rewards == {"Cave": 2.0}
    )


class Stale(Cave):
    def reset(self) -> str:
        return "go"  # forgets `done`


def test_a_stale_done_is_a_clear_error(tiny):
    pools = {None: EnvironmentPool(Stale)}
    played = Played(tiny.qwen(), [calls(call("leave"))], {}, env=pools)
    pools[None].release(played.instance, healthy=True)
    with pytest.raises(ConfigurationError, match=r"Stale.done is true right after reset\(\)"):
        Played(tiny.qwen(), [calls(call("leave"))], {}, env=pools)


@pytest.mark.parametrize(
    ("limit", "ran", "turns", "outcome"),
    [(0, 0, 1, "tool_limit"), (1, 1, 2, "tool_limit"), (3, 3, 4, "finished"), (None, 3, 4, "finished")],
)
def test_max_tool_calling_iterations_is_exact(tiny, limit, ran, turns, outcome):
    script = [*[calls(call(place=p), call(place=p)) for p in "abc"], "done"]
    played = Played(tiny.qwen(), script, {"prompt": ASK}, max_tool_calling_iterations=limit, max_completion_length=None)
    assert (len(played.env.asked), len(played.rollout.turns)) == (2 * ran, turns)
    assert played.rollout.outcome.value == outcome and not played.rollout.truncated
    assert len(trained(played.rollout)) == sum(len(t.output_ids or ()) for t in played.rollout.turns)


# --- which tools -----------------------------------------------------------------------
class Mill(Cave):
    run_inline = False

    def grind(self) -> str:
        """Grind."""
        return "flour"


def double(number: int) -> int:
    """
    Double a number.

    Args:
        number: A number.
    """
    return 2 * number


async def triple(number: int) -> int:
    """
    Triple a number.

    Args:
        number: A number.
    """
    await asyncio.sleep(0)
    return 3 * number


def test_standalone_tools_sync_and_async_beside_an_environment(tiny):
    script = [calls(call("double", number=4), call("triple", number=4), call(place="a")), "done"]
    for env, standalone in ((Cave, (double, triple)), (Mill, (double, triple))):
        played = Played(tiny.qwen(), script, {"prompt": ASK}, env=env, tools=standalone)
        assert tool_texts(played.rollout) == ["8", "12", "nothing in a"]
    played = Played(tiny.qwen(), script, {"prompt": ASK}, env=None, tools=(double, triple))
    assert tool_texts(played.rollout)[:2] == ["8", "12"] and "no tool named 'search'" in tool_texts(played.rollout)[2]
    assert played.rollout.environment is None and played.rollout.rewards == {}


def test_a_row_shows_the_tools_of_its_environment_only(tiny):
    pools = {"cave": EnvironmentPool(Cave), "mill": EnvironmentPool(Mill)}
    script = [calls(call("grind")), "done"]
    cave = Played(tiny.qwen(), script, {"environment": "cave", "hint": "go"}, env=pools)
    assert "no tool named 'grind'" in tool_texts(cave.rollout)[0] and cave.rollout.environment == "Cave"
    names = [tool["function"]["name"] for tool in cave.sampler.requests[0].tools]
    assert names == ["search", "leave", "read"] and "grind" not in tiny.qwen().decode(
        cave.sampler.requests[0].prompt_ids
    )
    mill = Played(tiny.qwen(), script, {"environment": "mill", "hint": "go"}, env=pools)
    assert tool_texts(mill.rollout) == ["flour"] and mill.rollout.environment == "Mill"
    with pytest.raises(ConfigurationError, match="'lake'; known: cave, mill"):
        Played(tiny.qwen(), script, {"environment": "lake"}, env=pools)


def test_two_tools_of_one_name_are_a_clear_error(tiny):
    def search(place: str) -> str:
        """
        Search.

        Args:
            place: Where.
        """
        return place

    with pytest.raises(ConfigurationError, match="'search' is both a standalone tool and a method of Cave"):
        Played(tiny.qwen(), [], {}, tools=(search,))


def test_f053_every_path_fills_the_same_fields(tiny):
    """F053: `truncated` and the rest are there with and without tools, environment, ids and a budget that ran out."""
    ends = []
    for env in (None, Cave, Speaks):
        for ids in (True, False):
            for budget in (1, 512):
                played = Played(
                    tiny.qwen(), ["hello world"], {"prompt": ASK}, env=env, ids=ids, max_completion_length=budget
                )
                fields = {f.name: getattr(played.rollout, f.name) for f in dataclasses.fields(Rollout)}
                assert set(fields["seconds"]) >= {"reset", "sample", "tools", "total"}
                assert isinstance(fields["truncated"], bool) and fields["truncated"] == (ids and budget == 1)
                assert played.rollout.turns[0].seconds > 0
                ends.append(played.rollout.outcome)
    assert ends.count(Outcome.TRUNCATED) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_completion_length", 0),
        ("max_tool_calling_iterations", -1),
        ("max_attempts", 0),
        ("max_failures_in_row", 0),
    ],
)
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ConfigurationError, match=name):
        RolloutSettings(**{name: value})

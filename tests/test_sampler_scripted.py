"""The samplers without a model: scripted and random."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError, SamplerError
from agentrl.sampler import RandomPolicy, ScriptedSampler
from agentrl.sampler.random_policy import draw_value
from agentrl.types import SampleOutput, SampleRequest, SamplingParams

PARAMS = SamplingParams()


class Letters:
    """A tokenizer whose ids are code points."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def ask(name: str = "a", *, ids: list[int] | None = None, max_tokens: int = 200, **more: Any) -> SampleRequest:
    fields: dict[str, Any] = {"messages": [], "tools": [], "seed": (0, 0, 0), "stop_ids": (2,), **more}
    return SampleRequest(prompt_ids=ids, max_tokens=max_tokens, params=PARAMS, conversation_id=name, **fields)


def run(sampler: Any, request: SampleRequest) -> SampleOutput:
    return asyncio.run(sampler.sample(request))


def test_ids_are_played_as_given_with_their_log_probs() -> None:
    sampler = ScriptedSampler([[5, 2], ([6, 7, 2], [-0.5, -0.25, -0.125])], version=3)
    assert run(sampler, ask(ids=[1])) == SampleOutput([5, 2], [-1.0, -1.0], "stop", 3)
    assert run(sampler, ask(ids=[1])) == SampleOutput([6, 7, 2], [-0.5, -0.25, -0.125], "stop", 3)
    assert [request.conversation_id for request in sampler.requests] == ["a", "a"]


def test_max_tokens_cuts() -> None:
    assert run(ScriptedSampler([[5, 6, 7, 2]]), ask(ids=[1], max_tokens=3)) == SampleOutput(
        [5, 6, 7], [-1.0] * 3, "length"
    )
    assert run(ScriptedSampler([[5, 6, 2]]), ask(ids=[1], max_tokens=3)).finish_reason == "stop"


def test_conversations_have_their_own_place_and_release_forgets_it() -> None:
    sampler = ScriptedSampler([[5, 2], [6, 2]])
    drawn = [run(sampler, ask(name, ids=[1])).ids for name in ("a", "b", "a")]
    assert drawn == [[5, 2], [5, 2], [6, 2]]
    with pytest.raises(SamplerError, match=r"2 turns.*'a' asks for turn 3"):
        run(sampler, ask("a", ids=[1]))
    sampler.release("a")
    assert run(sampler, ask("a", ids=[1])).ids == [5, 2]


def test_text_and_messages_become_ids_with_a_stop_id() -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"place": "öst"}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    sampler = ScriptedSampler({"a": ["hi", message]}, tokenizer=Letters())
    assert run(sampler, ask(ids=[1])).ids == [104, 105, 2]
    text = "".join(map(chr, run(sampler, ask(ids=[1])).ids or []))
    assert text == '<tool_call>\n{"name": "search", "arguments": {"place": "öst"}}\n</tool_call>\x02'
    with pytest.raises(ConfigurationError, match="tokenizer"):
        run(ScriptedSampler(["hi"]), ask(ids=[1]))


def test_without_prompt_ids_a_turn_is_a_message() -> None:
    output = run(ScriptedSampler(["hi"]), ask())
    assert (output.ids, output.log_probs, output.message) == (None, None, {"role": "assistant", "content": "hi"})


def test_a_callable_sees_the_request_and_exceptions_are_raised() -> None:
    async def script(request: SampleRequest) -> Any:
        return SamplerError("down") if request.conversation_id == "b" else [len(request.prompt_ids or []), 2]

    sampler = ScriptedSampler(script)
    assert run(sampler, ask("a", ids=[1, 1, 1])).ids == [3, 2]
    with pytest.raises(SamplerError, match="down"):
        run(sampler, ask("b", ids=[1]))


TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "enum": ["cave", "mill"]},
                "deep": {"type": "boolean"},
                "times": {"type": "integer", "minimum": 2, "maximum": 4},
            },
            "required": ["place", "times"],
        },
    },
}


def test_random_calls_fit_their_schema_and_follow_the_seed() -> None:
    policy = RandomPolicy(stop_p=0.0)
    turns = [run(policy, ask(tools=[TOOL], seed=(0, i, 0))) for i in range(50)]
    calls = [turn.message["tool_calls"][0]["function"]["arguments"] for turn in turns if turn.message]
    assert {call["place"] for call in calls} == {"cave", "mill"}
    assert {call["times"] for call in calls} == {2, 3, 4}
    assert run(policy, ask(tools=[TOOL], seed=(0, 7, 0))) == turns[7]
    assert run(RandomPolicy(1, stop_p=0.0), ask(tools=[TOOL], seed=(0, 7, 0))) != turns[7]


def test_random_policy_stops_with_its_probability_and_speaks_in_ids() -> None:
    stops = [run(RandomPolicy(stop_p=0.25), ask(tools=[TOOL], seed=(i,))).message for i in range(400)]
    assert 70 < sum("tool_calls" not in (message or {}) for message in stops) < 130
    output = run(RandomPolicy(stop_p=0.0, tokenizer=Letters()), ask(tools=[TOOL], ids=[1]))
    text = "".join(map(chr, (output.ids or [])[:-1]))
    assert json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))["name"] == "search"


SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
            st.integers(-9, 9),
            st.integers(0, 9),
        ),
        st.just({"type": "number", "minimum": -1, "exclusiveMaximum": 1}),
        st.just({"type": "string"}),
        st.just({"enum": [1, "b", None]}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["a"]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=6,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "number":
        return type(value) is float and schema["minimum"] <= value < schema["exclusiveMaximum"]
    if kind == "array":
        bounds = type(value) is list and schema["minItems"] <= len(value) <= schema["maxItems"]
        return bounds and all(fits(item, schema["items"]) for item in value)
    if kind == "object":
        known = schema["properties"]
        held = type(value) is dict and set(schema["required"]) <= set(value)
        return held and all(fits(value[name], known[name]) for name in value)
    return type(value) is {"boolean": bool, "null": type(None), "string": str}[kind]


@settings(max_examples=80, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_drawn_values_fit_their_schema(schema: dict[str, Any], seed: int) -> None:
    assert fits(draw_value(schema, ["word"], random.Random(seed)), schema)


def test_bounds_that_leave_one_value_are_met() -> None:
    draw = random.Random(0)
    assert draw_value({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4}, [], draw) == 3
    assert draw_value({"type": "integer", "minimum": 2.5, "maximum": 3.5}, [], draw) == 3
    assert draw_value({"$ref": "#/$defs/P", "$defs": {"P": {"const": 7}}}, [], draw) == 7


def test_the_package_imports_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import agentrl.sampler as s; s.ScriptedSampler([[1]]); s.RandomPolicy()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

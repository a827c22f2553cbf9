"""What the tests of formats with typed values share: tools, strategies, and the turns that original templates write."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from agentrl.render.formats.atem import Atem
from agentrl.render.formats.base import CallFormat, Think
from agentrl.render.formats.glm import Glm
from agentrl.render.formats.pythonic import Pythonic
from agentrl.render.formats.turn import Tagged
from agentrl.render.formats.xml_parameters import XmlParameters
from agentrl.render.jinja_env import compile_template
from agentrl.types import ParsedTurn

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"

XML, GLM, ATEM = XmlParameters(), Glm(), Atem()
LFM = Pythonic("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
BARE = Pythonic("pythonic", "", "")
FORMATS: list[CallFormat] = [XML, GLM, LFM, BARE]
THINK = Think("<think>", "</think>")
START, END = "<|tool_call_start|>", "<|tool_call_end|>"

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "t": {"type": "string"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "z": {"type": "integer", "nullable": True},
        "l": {"type": "array"},
        "o": {"type": "object"},
    },
}
SCHEMAS = {"act": PARAMETERS, "ns.look": {"type": "object", "properties": {}}}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "D.", "parameters": p}} for n, p in SCHEMAS.items()
]

HEADS = {"glm4moe": "<|assistant|>", "muse_glimmer": "<|start|>assistant"}
TAILS = {"glm4moe": "", "muse_glimmer": "<|eot|>"}


def written(family: str, calls: list[tuple[str, dict[str, Any]]], content: str = "", **more: Any) -> str:
    """An assistant turn with these calls as the family's original template writes it, without its end-of-turn token."""
    render = compile_template((TEMPLATES / f"{family}.jinja").read_text())
    made = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
    common = {"tools": TOOLS, "bos_token": "", "eos_token": "", "add_generation_prompt": False}
    before = render(messages=talk, **common)
    talk.append({"role": "assistant", "content": content, **({"tool_calls": made} if made else {}), **more})
    text = render(messages=talk, **common)
    head = HEADS.get(family, "<|im_start|>assistant\n")
    assert text.startswith(before + head)
    turn = text[len(before + head) :]
    tail = TAILS.get(family, "<|im_end|>")
    return turn[: turn.rindex(tail)] if tail else turn


def read(form: CallFormat | Atem, text: str, schemas: Any = SCHEMAS) -> ParsedTurn:
    return (form if isinstance(form, Atem) else Tagged(THINK, form)).read(text, schemas, opened=False, start=0)


def calls_of(form: CallFormat | Atem, text: str, schemas: Any = SCHEMAS) -> list[tuple[str, dict[str, Any]]]:
    turn = read(form, text, schemas)
    assert [call.error for call in turn.calls] == [None] * len(turn.calls)
    return [(call.name, call.arguments) for call in turn.calls]


def error_of(form: CallFormat | Atem, text: str) -> str:
    (call,) = read(form, text).calls
    assert call.error is not None and call.arguments == {}
    return call.error


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
EITHER = {"type": ["integer", "string"]}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
TAGS = [
    "\n", "</parameter>", "\n</parameter>\n", "<parameter=s>", "</function>", "<function=act>", "</tool_call>",
    "<tool_call>", "</arg_value>", "<arg_key>", "</arg_key>", "<arg_value>", "</atem:parameter>", "</atem:invoke>",
    '<atem:parameter name="', "'", '"', "\\", "\\n", ", s=", ")", "]", "[", "(", "{", "}", " ", "x", "é",
    "#", "\r", "\0",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(TAGS), max_size=8).map("".join) | st.text(max_size=20)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "s": TEXTS,
        "t": TEXTS,
        "i": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "z": st.none() | st.integers(),
        "l": st.lists(VALUES, max_size=3),
        "o": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.just("act"), ARGUMENTS), min_size=1, max_size=3)
ONE = {
    "xml_parameters": "<tool_call>\n<function=act>\n<parameter=i>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>act\n<arg_key>i</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    "lfm2": START + "[act(i={})]" + END,
}


def reason(form: CallFormat, why: str) -> str:
    return f"This tool call was not run: {why}. {form.hint}"

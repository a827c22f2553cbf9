"""Gymnasium's spaces as JSON for a model to write, and as text for a model to read."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigurationError, ToolArgumentError
from agentrl.gym.actions import action_of
from agentrl.gym.observations import check_readable, content_of, is_picture, parts_of
from agentrl.sampler.random_policy import draw_value


# --- actions ---------------------------------------------------------------------------
def as_json(space, value):
    """What a model would write for a value: a second implementation, the other way round."""
    if isinstance(space, spaces.Dict):
        return {key: as_json(sub, value[key]) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {f"part_{i}": as_json(sub, value[i]) for i, sub in enumerate(space.spaces)}
    if isinstance(space, spaces.Sequence):
        return [as_json(space.feature_space, one) for one in value]
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    return array.item() if array.size == 1 else array.tolist()


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return np.array_equal(one, two) and np.asarray(one).dtype == np.asarray(two).dtype


shapes = st.lists(st.integers(1, 3), min_size=0, max_size=2).map(tuple)
simple = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-2, 2)),
    st.builds(lambda shape, low: spaces.Box(low, low + 1.5, shape), shapes, st.floats(-2, 2)),
    st.builds(lambda shape: spaces.Box(-np.inf, np.inf, shape), shapes),
    st.builds(lambda shape: spaces.Box(0, 9, shape, np.int64), shapes),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
    st.builds(lambda n: spaces.MultiDiscrete(n), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.Text, st.integers(1, 4)),
)
nested = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
        inner.map(spaces.Sequence),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(nested, st.integers(0, 100))
def test_what_a_model_writes_becomes_the_value_it_means(space, seed):
    space.seed(seed)
    action, value = action_of(space), space.sample()
    written = json.loads(json.dumps(as_json(space, value)))
    decoded = action.decode(written)
    assert same(decoded, value) and space.contains(decoded)


@settings(max_examples=40, deadline=None)
@given(nested, st.integers(0, 100))
def test_F083_what_the_schema_allows_is_an_action_or_is_refused_in_words(space, seed):
    action = action_of(space)
    drawn = draw_value(action.schema, ["ab", "word"], random.Random(seed))
    try:
        assert space.contains(action.decode(drawn))
    except ToolArgumentError as error:  # bounds that differ between elements, texts that are too long
        assert "No step was taken" in str(error)


def test_schemas_by_hand():
    number = action_of(spaces.Box(-2.0, 2.0, (1,))).schema
    assert number == {"type": "number", "minimum": -2.0, "maximum": 2.0, "description": "A number from -2 to 2."}
    bounded = spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32))
    assert action_of(bounded).schema == {
        "type": "array", "items": {"type": "number", "minimum": -1.0}, "minItems": 2, "maxItems": 2,
        "description": "A list of 2 numbers (0: from -1 to 1; 1: of at least 0).",
    }  # fmt: skip
    assert action_of(spaces.MultiBinary(3)).schema == {
        "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1}, "minItems": 3, "maxItems": 3,
        "description": "A list of 3 whole numbers from 0 to 1.",
    }  # fmt: skip
    both = action_of(spaces.Tuple([spaces.Discrete(2), spaces.Text(3)])).schema
    assert both["properties"]["part_0"]["maximum"] == 1 and both["required"] == ["part_0", "part_1"]
    assert action_of(spaces.Discrete(2, start=5), ["a", "b"]).decode("b") == 6


@pytest.mark.parametrize(
    ("space", "value", "says"),
    [
        (spaces.Box(-2.0, 2.0, (1,)), 2.5, "a number from -2 to 2, not 2.5"),
        (spaces.Box(-2.0, 2.0, (1,)), float("nan"), "a number from -2 to 2"),
        (spaces.Box(-2.0, 2.0, (1,)), True, "not True"),
        (spaces.Box(-1.0, 1.0, (2,)), [0.5], "a list of 2 numbers from -1 to 1, not \\[0.5\\]"),
        (spaces.Box(-1.0, 1.0, (2, 2)), [[0, 0], [0]], "nested lists of 2 x 2 numbers"),
        (spaces.Box(-1.0, 1.0, (2,)), [0.5, "x"], "a list of 2 numbers"),
        (spaces.Box(0, 255, (2,), np.uint8), [0, 256], "whole numbers from 0 to 255"),
        (spaces.Box(0, 255, (2,), np.uint8), [0, 10**30], "whole numbers from 0 to 255"),
        (spaces.Box(0, 255, (2,), np.uint8), [0, 1.5], "whole numbers"),
        (spaces.Box(-np.inf, np.inf, (1,)), 1e300, "a number, not 1e"),
        (spaces.MultiDiscrete([2, 5]), [2, 0], r"0: from 0 to 1; 1: from 0 to 4\), not \[2, 0\]"),
        (spaces.Discrete(3, start=1), 0, "a whole number from 1 to 3, not 0"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, "exactly the keys a"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 7}, "'action.a' should be a whole number from 0 to 1, not 7"),
        (spaces.Text(3), "four", "text of 1 to 3 characters"),
        (spaces.Text(3, charset="ab"), "c", "made of these: 'ab'"),
        (spaces.Sequence(spaces.Discrete(2)), 1, "a list of any length"),
    ],
)
def test_actions_outside_their_space_name_what_is_inside(space, value, says):
    with pytest.raises(ToolArgumentError, match=says):
        action_of(space).decode(value)


def test_a_bound_can_be_reached_as_it_is_written():
    """0.7 in double precision is more than the bound 0.7 in single precision."""
    space = spaces.Box(-0.7, 0.7, (1,))
    assert action_of(space).decode(0.7) == np.float32(0.7)
    assert action_of(space).decode(-0.7) == np.float32(-0.7)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Graph(spaces.Discrete(2), spaces.Discrete(2)),
        spaces.OneOf([spaces.Discrete(2), spaces.Text(3)]),
        spaces.Dict({"ok": spaces.Discrete(2), "bad": spaces.Graph(spaces.Discrete(2), None)}),
        spaces.Sequence(spaces.Discrete(2), stack=True),
    ],
)
def test_action_spaces_without_a_text_form_are_named(space):
    with pytest.raises(ConfigurationError, match="no text form") as caught:
        action_of(space)
    assert "Graph" in str(caught.value) or "OneOf" in str(caught.value) or "stack" in str(caught.value)


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", ""], ["a", 3]])
def test_names_must_fit(names):
    with pytest.raises(ConfigurationError, match="2 different names"):
        action_of(spaces.Discrete(2), names)
    with pytest.raises(ConfigurationError, match="Discrete"):
        action_of(spaces.MultiBinary(2), ["a", "b"])


# --- observations ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("space", "value", "labels", "text"),
    [
        (spaces.Discrete(5), 3, (), "3"),
        (spaces.Discrete(5), np.int64(3), (), "3"),
        (spaces.Box(-1, 1, (2,)), np.array([0.123456, -0.0], np.float32), (), "[0.1235, 0]"),
        (spaces.Box(-1, 1, (1,)), np.array([0.5], np.float32), (), "0.5"),
        (spaces.Box(-9e9, 9e9, ()), np.float32(1234567), (), "1.235e+06"),
        (spaces.Box(0, 9, (2, 2), np.int64), np.arange(4).reshape(2, 2), (), "[0, 1]\n[2, 3]"),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), (), "[1, 0, 1]"),
        (spaces.MultiBinary(2), np.array([1, 0], np.int8), ("door", "key"), "door 1, key 0"),
        (spaces.Tuple([spaces.Discrete(9), spaces.Discrete(2)]), (4, 1), (), "[4, 1]"),
        (spaces.Tuple([spaces.Discrete(9), spaces.Discrete(2)]), (4, 1), ("sum", "ace"), "sum 4, ace 1"),
        (spaces.Text(9), "é\n漢", (), "é\n漢"),
        (spaces.Tuple([spaces.Text(9), spaces.Discrete(2)]), ("hi", 1), (), "['hi', 1]"),
        (spaces.Sequence(spaces.Discrete(9)), (1, 2), (), "[1, 2]"),
        (
            spaces.Dict({"pos": spaces.Box(0, 9, (2,)), "in": spaces.Dict({"x": spaces.Discrete(2)})}),
            {"pos": np.array([1.0, 2.0]), "in": {"x": 1}},
            (),
            "in: x: 1\npos: [1, 2]",
        ),
        (
            spaces.Tuple([spaces.Box(0, 9, (2, 2)), spaces.Discrete(2)]),
            (np.zeros((2, 2)), 1),
            ("board", "turn"),
            "board:\n[0, 0]\n[0, 0]\nturn: 1",
        ),
    ],
)
def test_observations_by_hand(space, value, labels, text):
    check_readable(space, False)
    assert content_of(list(parts_of(space, value, labels))) == text


def test_pictures_become_image_blocks_of_their_own():
    space = spaces.Dict({"image": spaces.Box(0, 255, (4, 6, 3), np.uint8), "mission": spaces.Text(20)})
    pixels = np.zeros((4, 6, 3), np.uint8)
    content = content_of(list(parts_of(space, {"image": pixels, "mission": "go"})))
    pixels[:] = 255  # environments reuse their buffers
    assert [block["type"] for block in content] == ["text", "image", "text"]
    assert content[0]["text"] == "image:" and content[2]["text"] == "mission: go"
    assert content[1]["image"].size == (6, 4) and content[1]["image"].getpixel((0, 0)) == (0, 0, 0)
    text = content_of(list(parts_of(space, {"image": pixels, "mission": "go"}, pictures=False)))
    assert text.startswith("image:\n[255, 255, 255]")


def test_what_is_a_picture():
    def box(*shape, dtype=np.uint8):
        return spaces.Box(0, 255, shape, dtype)

    assert is_picture(box(64, 64, 3)) and is_picture(box(64, 64, 1)) and is_picture(box(84, 84))
    assert not is_picture(box(8, 8)) and not is_picture(box(4, 84, 84)) and not is_picture(box(64, 64, 3, dtype=int))
    for shape in ((84, 84, 1), (84, 84)):
        grey = np.full(shape, 7, np.uint8)
        (block,) = content_of(list(parts_of(box(*shape), grey)))
        grey[:] = 9  # Pillow shares the memory of grey pictures
        assert block["image"].getpixel((3, 3)) == 7


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (spaces.OneOf([spaces.Discrete(2)]), "OneOf"),
        (spaces.Graph(spaces.Box(0.0, 1.0, (500,)), None), r"'observation.nodes'"),
        (spaces.Box(0.0, 1.0, (1000,)), r"\(1000 numbers\)"),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), r"\(28224 numbers\)"),
        (spaces.Dict({"a": spaces.Tuple([spaces.Box(0.0, 1.0, (20, 20))])}), r"'observation.a\[0\]'"),
        (spaces.Sequence(spaces.Box(0.0, 1.0, (500,))), r"'observation\[\]'"),
    ],
)
def test_observation_spaces_without_a_text_form_are_named(space, says):
    with pytest.raises(ConfigurationError, match=says):
        check_readable(space, True)
    with pytest.raises(ConfigurationError, match="no text form"):
        check_readable(space, False)


@settings(max_examples=60, deadline=None)
@given(nested, st.integers(0, 100))
def test_every_readable_space_is_read(space, seed):
    space.seed(seed)
    check_readable(space, True)
    assert isinstance(content_of(list(parts_of(space, space.sample()))), str)

"""What is known about environments of Gymnasium, MiniGrid and Atari that their spaces do not say: names, and texts."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.gym import minigrid

_CHEAP = ("gymnasium.envs.toy_text.", "gymnasium.envs.classic_control.")  # a step takes microseconds of pure CPU
_ABOUT_CHARS = 240


@dataclass(frozen=True, slots=True)
class Known:
    """One environment: a line about it, names of its discrete actions, of its numbers, and a sentence for a state."""

    about: str | Callable[[Any], str]
    actions: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    state: Callable[[Any, Any], str] | None = None  # (unwrapped environment, observation) -> what is seen
    legend: str = ""  # to read `state` with
    start: Callable[[Any], str] | None = None  # unwrapped environment -> what is to be done in this episode
    beside: Callable[[Any], str] | None = None  # unwrapped environment -> what an observation as a picture lacks


def _on_grid(env: Any, observation: Any) -> str:
    columns = env.ncol if hasattr(env, "ncol") else env.shape[1]
    row, column = divmod(int(observation), columns)
    return f"You are at row {row}, column {column} (observation {int(observation)})."


def _on_ice(env: Any) -> str:
    slippery = len(env.P[0][0]) > 1  # an action has several possible results
    slides = " The ice is slippery: you may slide to the side of where you want to go." if slippery else ""
    return f"Walk over the ice F from S to G, and not into a hole H. [ ] marks where you are.{slides}"


def _in_taxi(env: Any, observation: Any) -> str:
    row, column, passenger, destination = (int(part) for part in env.decode(int(observation)))
    where = "in the taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    at = f"The taxi is at row {row}, column {column}, the passenger {where}"
    return f"{at}, the destination is {'RGYB'[destination]} (observation {int(observation)})."


def _at_table(env: Any, observation: Any) -> str:
    own, dealer, ace = (int(part) for part in observation)
    return f"Your sum is {own}, the dealer shows {dealer}, you have {'a' if ace else 'no'} usable ace."


def _on_console(env: Any) -> str:
    frames = env._frameskip if isinstance(env._frameskip, int) else f"{env._frameskip[0]} or more"
    sticky = float(env.ale.getFloat("repeat_action_probability"))
    again = f" With probability {sticky:g} the console repeats the last action instead." if sticky else ""
    return f"An Atari 2600 game: get a high score. A step lasts {frames} frame{'' if frames == 1 else 's'}.{again}"


def _lives(env: Any) -> str:
    lives = env.ale.lives()
    return f"Lives: {lives}." if lives else ""


_CAR = ("position", "velocity")
_KNOWN = {
    "FrozenLakeEnv": Known(
        _on_ice,
        ("left", "down", "right", "up"),
        state=_on_grid,
    ),
    "CliffWalkingEnv": Known(
        "Walk from the lower left corner to T. x is you, C is the cliff: falling costs 100 and puts you back.",
        ("up", "right", "down", "left"),
        state=_on_grid,
    ),
    "TaxiEnv": Known(
        "Drive to the passenger, pick them up, drive to the destination, drop them off. Walls are | signs; [ ] marks "
        "the taxi.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        state=_in_taxi,
    ),
    "BlackjackEnv": Known(
        "Get closer to 21 than the dealer without going over. Face cards count 10, an ace 1 or 11.",
        ("stick", "hit"),
        state=_at_table,
    ),
    "CartPoleEnv": Known(
        "Push the cart so that the pole on it stays upright and the cart stays near the middle.",
        ("left", "right"),
        ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    ),
    "MountainCarEnv": Known(
        "The engine is too weak for the hill: swing to and fro until the car reaches position 0.5.",
        ("left", "none", "right"),
        _CAR,
    ),
    "Continuous_MountainCarEnv": Known(
        "The engine is too weak for the hill: swing to and fro until the car reaches position 0.45. The action is the "
        "force, to the right if positive.",
        numbers=_CAR,
    ),
    "PendulumEnv": Known(
        "Swing the pendulum up and keep it upright (x = 1) with little torque. The action is the torque.",
        numbers=("x", "y", "angular velocity"),
    ),
    "AcrobotEnv": Known(
        "Swing the free end of two linked rods above the height of one rod. The action is the torque on the joint "
        "between them.",
        ("negative", "none", "positive"),
        ("cos angle 1", "sin angle 1", "cos angle 2", "sin angle 2", "angular velocity 1", "angular velocity 2"),
    ),
    "MiniGridEnv": Known(
        minigrid.about,
        state=minigrid.seen,
        legend=minigrid.LEGEND,
        start=minigrid.mission,
        beside=minigrid.situation,
    ),
    "AtariEnv": Known(_on_console, beside=_lives),
}
_HOMES = ("gymnasium.envs.", "minigrid.", "ale_py.")
_NOTHING = Known("")


def known(env: Any) -> Known:
    """What is known about an unwrapped environment, also about a subclass of a known one."""
    for cls in type(env).__mro__:
        if cls.__module__.startswith(_HOMES) and cls.__name__ in _KNOWN:
            return _KNOWN[cls.__name__]
    return _NOTHING


def is_cheap(env: Any) -> bool:
    """True for toy_text and classic_control: their steps need no thread."""
    return type(env).__module__.startswith(_CHEAP)


def about(env: Any) -> str:
    """A line about an unwrapped environment: ours, or the first sentence of its docstring, or nothing."""
    written = known(env).about
    if written:
        return written(env) if callable(written) else written
    doc = inspect.cleandoc(vars(type(env)).get("__doc__") or "")
    paragraphs = [part for part in re.split(r"\n\s*\n", doc) if not part.lstrip().startswith(("#", "|", "```", "!"))]
    if not paragraphs:
        return ""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    text = re.sub(r"<[^>]+>|[*`_]{1,2}(?=\w)|(?<=\w)[*`]{1,2}", "", text)
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return sentence if len(sentence) <= _ABOUT_CHARS else sentence[: _ABOUT_CHARS - 3] + "..."


def action_names(env: Any, count: int) -> Sequence[str]:
    """Names for the `count` discrete actions of an unwrapped environment: ours, its own, or action_0 and so on.

    An environment names its actions with `get_action_meanings()` or an enum of integers `actions`.
    """
    found: Sequence[str] = known(env).actions
    if not found and callable(getattr(env, "get_action_meanings", None)):
        found = [str(name).lower() for name in env.get_action_meanings()]
    members = getattr(env, "actions", None)
    if not found and isinstance(members, type) and issubclass(members, enum.IntEnum):
        found = [member.name for member in sorted(members) if member < count]
    if len(found) == count == len(set(found)):
        return found
    return [f"action_{index}" for index in range(count)]


_HIGHLIGHT = re.compile(r"\x1b\[([\d;]*)m(.)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def plain(ansi: str) -> str:
    r"""Terminal text without escape codes; what stood on a coloured ground is set in brackets.

    >>> plain("\x1b[41mS\x1b[0mFF\n\x1b[34;1mB\x1b[0m:")
    '[S]FF\nB:'
    """

    def mark(match: re.Match[str]) -> str:
        ground = any(code.isdigit() and (40 <= int(code) <= 47 or int(code) == 7) for code in match[1].split(";"))
        return f"[{match[2]}]" if ground else match[2]

    return _ESCAPE.sub("", _HIGHLIGHT.sub(mark, ansi)).strip("\n").rstrip()

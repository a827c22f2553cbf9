"""Text spaces that hold any text.

Gymnasium's `Text` checks every character against a set: with all of Unicode that takes seconds. Its shared memory pads
short texts with what stood there before, so an AsyncVectorEnv would return stale text without a word; these spaces
refuse it.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import random
import string
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import create_shared_memory

from agentrl.sampler.random_policy import draw_value

_SAMPLED = 32  # characters of a sampled text, at most


class FreeText(spaces.Text):
    """Any text of at most `max_length` characters.

    >>> "é漢\\n" in FreeText(3), "four" in FreeText(3)
    (True, False)
    """

    def __init__(self, max_length: int, *, seed: Any = None) -> None:
        super().__init__(max_length, min_length=0, charset=string.ascii_letters + string.digits + " ", seed=seed)

    def contains(self, x: Any) -> bool:
        """True for a string that is not too long, whatever its characters."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random text; masks are those of `Text`."""
        if mask is not None or probability is not None:
            return super().sample(mask, probability)
        length = int(self.np_random.integers(min(self.max_length, _SAMPLED) + 1))
        return "".join(self.np_random.choice(self.character_list, size=length))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        return type(other) is type(self) and self.max_length == other.max_length  # type: ignore[attr-defined]


class CallText(FreeText):
    """What an agent may say in one turn. A sample is a call of a random tool with arguments that fit its schema.

    >>> place = {"type": "string", "enum": ["cave"]}
    >>> tool = {"function": {"name": "search", "parameters": {"properties": {"place": place}, "required": ["place"]}}}
    >>> CallText(100, [tool]).sample()
    '{"name": "search", "arguments": {"place": "cave"}}'
    """

    def __init__(self, max_length: int, tools: Sequence[dict[str, Any]], *, seed: Any = None) -> None:
        super().__init__(max_length, seed=seed)
        self.tools = list(tools)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A valid call in JSON; a short text where there are no tools."""
        if mask is not None or probability is not None or not self.tools:
            return super().sample(mask, probability)
        rng = random.Random(int(self.np_random.integers(2**62)))
        function = rng.choice(self.tools)["function"]
        arguments = draw_value({"type": "object", **function.get("parameters", {})}, ["a", "b", "word"], rng)
        return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


@create_shared_memory.register(FreeText)
def _no_shared_memory(space: FreeText, n: int = 1, ctx: ModuleType = mp) -> Any:
    raise CustomSpaceError(
        "Text of an agent environment cannot be shared between processes: short texts would be padded with older ones. "
        "Pass shared_memory=False (in make_vec: vector_kwargs={'shared_memory': False})."
    )

"""Where in somebody's code something went wrong."""

from __future__ import annotations

import inspect
import os
import traceback
from typing import Any

from agentrl.calls import describe
from agentrl.lane import attempt

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def source_of(thing: Any) -> str:
    """The file of a class, a function or an object's class; "" where there is none."""
    thing = getattr(thing, "func", thing)
    cls = thing if isinstance(thing, type) or inspect.isfunction(thing) else type(thing)
    ok, path = attempt(inspect.getsourcefile, cls)
    return path if ok and isinstance(path, str) else ""


def place_of(error: BaseException, source: str = "") -> str:
    """The line of the environment's code where an exception began; "" where it is not known.

    Args:
        error: Perhaps with causes, of which the first is the one to look at.
        source: The environment's file. The last line in it is taken, else the last one outside of agentrl.
    """
    seen = {id(error)}
    while (cause := error.__cause__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        error = cause
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if source and frame.filename == source]
    own = own or [frame for frame in frames if not os.path.abspath(frame.filename).startswith(_OURS)]
    if not own:
        return ""
    frame = own[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"{os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}{line}"


def told(error: BaseException, source: str = "") -> str:
    """What the exception says, as a sentence, and where it began.

    >>> told(ValueError("no such place"))
    'ValueError: no such place.'
    """
    text, place = describe(error).rstrip(), place_of(error, source)
    text = text if text.endswith((".", "!", "?")) else f"{text}."
    return f"{text} ({place})" if place else text

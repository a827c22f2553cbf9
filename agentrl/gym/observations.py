"""An observation as what a model reads: text, and images where a space holds pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from agentrl.errors import ConfigurationError
from agentrl.types import Content

_MOST_NUMBERS = 256  # of one Box, as text

Part = Any
"""A line of text, or a PIL image."""


def is_picture(space: spaces.Space[Any]) -> bool:
    """True for a Box of bytes with the shape [height, width, 1, 3 or 4], or a [height, width] too big for a board."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    shape = space.shape
    return (len(shape) == 3 and shape[2] in (1, 3, 4)) or (len(shape) == 2 and shape[0] * shape[1] > _MOST_NUMBERS)


def picture(array: Any, size: int | None = None) -> Any:
    """A PIL image of its own, which the environment cannot change any more.

    With a size, its longer side has that many pixels: smaller pictures are enlarged with hard edges, larger ones
    averaged.

    >>> picture(np.zeros((2, 4, 3), np.uint8), 8).size
    (8, 4)
    """
    from PIL import Image

    array = np.array(array, dtype=np.uint8)
    image = Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)
    longer = max(image.size)
    if size is None or size == longer:
        return image
    width, height = (max(1, round(side * size / longer)) for side in image.size)
    return image.resize((width, height), Image.Resampling.NEAREST if size > longer else Image.Resampling.BOX)


def check_readable(space: spaces.Space[Any], pictures: bool, path: str = "observation") -> None:
    """A model can read every value of the space.

    Raises:
        ConfigurationError: naming the space that has no text form.
    """
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)) or _is_text(space):
        return
    if isinstance(space, spaces.Graph):
        for name, sub in (("nodes", space.node_space), ("edges", space.edge_space)):
            if sub is not None:
                check_readable(sub, pictures, f"{path}.{name}")
        return
    if isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            check_readable(sub, pictures, f"{path}.{key}")
        return
    if isinstance(space, spaces.Tuple):
        for index, sub in enumerate(space.spaces):
            check_readable(sub, pictures, f"{path}[{index}]")
        return
    if isinstance(space, spaces.Sequence):
        return check_readable(space.feature_space, pictures, f"{path}[]")
    count = int(np.prod(space.shape)) if isinstance(space, spaces.Box) else None
    if count is not None and (count <= _MOST_NUMBERS or (pictures and is_picture(space))):
        return
    size = f" ({count} numbers)" if count is not None else ""
    hint = (
        "observation='auto' shows it as an image"
        if is_picture(space)
        else "Wrap the environment, or pass observation='image' to show what it renders"
    )
    raise ConfigurationError(f"The space {space!s:.200}{size} ('{path}') has no text form. {hint}.")


def parts_of(
    space: spaces.Space[Any], value: Any, labels: Sequence[str] = (), *, pictures: bool = True, size: int | None = None
) -> Iterator[Part]:
    """The observation in lines of text and images, in order.

    Example:
        >>> space = spaces.Box(-1.0, 1.0, (2,))
        >>> list(parts_of(space, np.array([0.123456, -1.0], np.float32), ["position", "velocity"]))
        ['position 0.1235, velocity -1']
        >>> list(parts_of(spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Text(5)}), {"a": 2, "b": "hi"}))
        ['a: 2', 'b: hi']
    """
    if pictures and is_picture(space):
        yield picture(value, size)
    elif isinstance(space, spaces.Dict):
        for key, sub in space.spaces.items():
            yield from _labelled(str(key), list(parts_of(sub, value[key], pictures=pictures, size=size)))
    elif isinstance(space, spaces.Tuple) and not _flat(space):
        for index, sub in enumerate(space.spaces):
            name = labels[index] if labels else str(index)
            yield from _labelled(name, list(parts_of(sub, value[index], pictures=pictures, size=size)))
    elif isinstance(space, spaces.Sequence) and not space.stack and not _plain(space.feature_space):
        yield f"{len(value)} items"
        for index, one in enumerate(value):
            yield from _labelled(str(index), list(parts_of(space.feature_space, one, pictures=pictures, size=size)))
    elif isinstance(space, spaces.Graph):
        yield from _graph(space, value)
    else:
        yield _line(value, labels)


def _is_text(space: spaces.Space[Any]) -> bool:
    """True for Text, and for spaces of strings that packages define (MiniGrid's missions)."""
    return isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U")


def _graph(space: spaces.Graph, value: Any) -> Iterator[str]:
    """The nodes, then the edges with their ends."""
    edges = [] if value.edge_links is None else [(int(one), int(two)) for one, two in value.edge_links]
    yield f"graph of {len(value.nodes)} nodes and {len(edges)} edges"
    for index, node in enumerate(value.nodes):
        yield f"node {index}: {_line(node)}"
    for index, (one, two) in enumerate(edges):
        carried = "" if value.edges is None or space.edge_space is None else f": {_line(value.edges[index])}"
        yield f"edge {one} -> {two}{carried}"


def _plain(space: spaces.Space[Any]) -> bool:
    return isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)) or (
        isinstance(space, spaces.Box) and space.shape in ((), (1,))
    )


def _flat(space: spaces.Tuple) -> bool:
    return all(_plain(sub) for sub in space.spaces)


def _labelled(name: str, parts: list[Part]) -> Iterator[Part]:
    if parts and isinstance(parts[0], str) and "\n" not in parts[0] and len(parts) == 1:
        yield f"{name}: {parts[0]}"
    else:
        yield f"{name}:"
        yield from parts


def _line(value: Any, labels: Sequence[str] = ()) -> str:
    if isinstance(value, str):
        return value
    array = None if isinstance(value, (list, tuple)) else np.asarray(value)
    if array is not None and array.ndim > 1:
        return "\n".join(_line(row) for row in array)
    listed = list(value) if array is None else np.atleast_1d(array).tolist()
    if labels and len(labels) == len(listed):
        return ", ".join(f"{label} {_number(one)}" for label, one in zip(labels, listed, strict=True))
    shown = [_line(one) if isinstance(one, (list, tuple, np.ndarray)) else _number(one) for one in listed]
    single = array is not None and array.size == 1 and array.ndim < 2
    return shown[0] if single else f"[{', '.join(shown)}]"


def _number(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    return f"{float(value) + 0.0:.4g}"  # adding 0.0 makes a negative zero positive


def content_of(parts: Sequence[Part]) -> Content:
    """The parts as one text, or as content blocks where there are images."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, str):
            blocks.append({"type": "image", "image": part})
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += f"\n{part}"
        else:
            blocks.append({"type": "text", "text": part})
    return blocks

"""Content blocks with images, found in messages and opened: whatever the source, an RGB picture or one clear error."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError, ConfigurationError, EnvironmentFailed
from agentrl.types import Message

_KINDS = frozenset({"image", "image_url", "input_image"})
_SOURCES = ("image", "image_url", "url", "path", "base64")


def is_image(block: Any) -> bool:
    """True for a content block that stands for an image; Arrow gives every block every key, so None counts as absent.

    >>> is_image({"type": "image", "image": None}), is_image({"type": "text", "text": "a", "image": None})
    (True, False)
    """
    if not isinstance(block, dict):
        return False
    kind = block.get("type")
    return kind in _KINDS if kind else any(block.get(key) is not None for key in ("image", "image_url"))


def blocks_of(messages: Sequence[Message]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The image blocks of the messages, in order, each with the index of its message."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for block in content:
                if is_image(block):
                    yield i, block


def fault(message: Message, index: int, why: str) -> AgentRLError:
    """The error for an image that cannot be shown: the environment's fault where a tool gave it, else the prompt's."""
    role = message.get("role")
    text = f"The image in messages[{index}] ({role}) cannot be shown: {why}"
    return EnvironmentFailed(text) if role == "tool" else ConfigurationError(text)


def check_observation(content: Any) -> None:
    """The images that `reset` returned can be opened.

    Raises:
        EnvironmentFailed: One of them cannot.
    """
    for _, block in blocks_of([{"role": "user", "content": content}]):
        try:
            open_image(block)
        except ValueError as e:
            raise EnvironmentFailed(f"reset() returned an image that cannot be shown: {e}", stage="reset") from e


def in_row(row: dict[str, Any]) -> list[Any]:
    """The pictures in the row's column `images` or `image`. Text there is no picture: it names a container, say.

    >>> in_row({"prompt": "Fix it.", "image": "python:3.12"})
    []
    """
    given = row.get("images") if row.get("images") is not None else row.get("image")
    return [one for one in (given if isinstance(given, list | tuple) else [given]) if _is_picture(one)]


def with_column(messages: list[Message], row: dict[str, Any]) -> list[Message]:
    """The messages with the pictures of the row's column, where they hold no image themselves.

    Blocks ``{"type": "image"}`` without an image take them in order; without such blocks they begin the first user
    message.

    Raises:
        ConfigurationError: Other numbers of such blocks and pictures, or no user message.
    """
    pictures = in_row(row)
    blocks = [block for _, block in blocks_of(messages)]
    if not pictures or any(_source(block) is not None for block in blocks):
        return messages
    if blocks:
        if len(blocks) != len(pictures):
            raise ConfigurationError(
                f"The prompt has {len(blocks)} image blocks and the row {len(pictures)} images; one belongs to each."
            )
        rest = iter(pictures)
        return [_replaced(message, lambda _: {"type": "image", "image": next(rest)}) for message in messages]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ConfigurationError("The row has images but its prompt no user message to show them in.")
    content = messages[first].get("content") or ""
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    shown = messages[first] | {"content": [{"type": "image", "image": one} for one in pictures] + texts}
    return [*messages[:first], shown, *messages[first + 1 :]]


def bare(messages: Sequence[Message]) -> list[Message]:
    """The messages with every image block as templates know it, ``{"type": "image"}``."""
    return [_replaced(message, lambda _: {"type": "image"}) for message in messages]


def open_image(block: dict[str, Any]) -> Any:
    """The block's image as an RGB PIL image with pixels of its own, turned upright where its EXIF data says so.

    Raises:
        ValueError: Why there is none, as a sentence.

    Example:
        >>> import numpy
        >>> open_image({"type": "image", "image": numpy.zeros([2, 3, 3], numpy.uint8)}).size
        (3, 2)
    """
    source = _source(block)
    if source is None:
        raise ValueError("its block holds no image. Put it there: {'type': 'image', 'image': picture}.")
    from PIL import ImageOps

    picture = _picture(source, encoded="base64" in block and block["base64"] is source)
    if not all(picture.size):
        raise ValueError(f"it is {picture.width} x {picture.height} pixels. Give it at least one pixel each way.")
    try:
        return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as e:  # pixels are read here: PIL raises whatever its decoder does
        raise ValueError(f"its data is broken ({e}).") from e


def _replaced(message: Message, make: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    return message | {"content": [make(block) if is_image(block) else block for block in content]}


def _source(block: dict[str, Any]) -> Any:
    return next((block[key] for key in _SOURCES if block.get(key) is not None), None)


def _is_picture(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("bytes") is not None
    return type(value).__module__.partition(".")[0] == "PIL" or hasattr(value, "__array__")


def _picture(source: Any, *, encoded: bool = False) -> Any:
    """A PIL image of a picture, an array, encoded bytes, a path, a data URL, or a dict with one of these."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, dict):  # OpenAI's {"url": ...}, and the {"bytes": ..., "path": ...} of datasets
        inner = next((source[key] for key in ("url", "bytes", "path") if source.get(key) is not None), None)
        if inner is None:
            raise ValueError(f"its block holds a dict with the keys {sorted(source)}; it needs 'url' or 'bytes'.")
        return _picture(inner)
    if isinstance(source, str) and (encoded or source.startswith("data:")):
        try:
            source = base64.b64decode(source if encoded else source.partition(",")[2], validate=True)
        except ValueError as e:
            raise ValueError(f"its base64 text cannot be decoded ({e}).") from e
    if isinstance(source, bytes | bytearray | memoryview):
        return _decoded(io.BytesIO(source), "the bytes")
    if isinstance(source, str | Path):
        return _from_path(str(source))
    if hasattr(source, "__array__"):
        return _from_array(source)
    raise ValueError(
        f"it is a {type(source).__name__}. Use a PIL image, a uint8 array, a path, encoded bytes or a data URL."
    )


def _from_path(text: str) -> Any:
    if text.partition("://")[0] in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise ValueError(f"agentrl downloads nothing, and it is the address {text:.100}. Load the image yourself.")
    path = Path(text.removeprefix("file://")).expanduser()
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as e:
        raise ValueError(f"the file {text!r:.200} cannot be read ({type(e).__name__}).") from e
    return _decoded(io.BytesIO(data), f"the file {text!r:.200}")


def _decoded(stream: io.BytesIO, name: str) -> Any:
    from PIL import Image

    try:
        picture = Image.open(stream)
        picture.load()
    except Exception as e:  # formats, truncation, decompression bombs: PIL raises many kinds
        raise ValueError(f"{name} cannot be read as an image ({type(e).__name__}).") from e
    return picture


def _from_array(source: Any) -> Any:
    import numpy as np
    from PIL import Image

    array = np.asarray(source)
    if array.dtype != np.uint8:
        raise ValueError(f"it is an array of {array.dtype}. Scale it to 0..255 and convert it to uint8.")
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # channels first, as PyTorch has them
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim != 2 and (array.ndim != 3 or array.shape[2] not in (3, 4)):
        raise ValueError(f"it is an array of the shape {list(array.shape)}. Use [height, width, 3].")
    if 0 in array.shape:
        raise ValueError(f"it is {array.shape[1]} x {array.shape[0]} pixels. Give it at least one pixel each way.")
    return Image.fromarray(np.ascontiguousarray(array))

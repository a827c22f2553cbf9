"""Messages with images, and what writes them, for the tests of images."""

from __future__ import annotations

from typing import Any

from agentrl.render.codec import Codec
from agentrl.render.images import Images


def block(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def says(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def images_of(processor: Any) -> Images:
    """Images whose template is rendered by the processor itself."""
    return Images(processor, Codec(processor.tokenizer), lambda talk: processor.apply_chat_template(talk))


def call(number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": {"at": number}}}

"""Images between messages and tokens: what stands for an image in a prompt, and what a model's forward needs of it."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.errors import ConfigurationError
from agentrl.pictures import bare, blocks_of, fault, open_image
from agentrl.render.codec import Codec
from agentrl.types import Message

_CACHE_BYTES = 1 << 28  # of features that are kept after use, 256 MiB
_PROBE_SIZE = (448, 448)  # large enough that every family writes more than one token


class Expansion:
    """One image as a model sees it. Equal where the pictures are equal; passed by reference, never changed.

    Attributes:
        key: Digest of the picture's pixels.
        size: Width and height of the picture.
        text: What stands for it in a prompt, control tokens written out.
        token_ids: The ids whose embeddings the model replaces by features of the image.
        tokens: How many of them `text` has.
        features: The processor's other outputs for this image alone: `pixel_values`, `image_grid_thw` and the like,
            leading axis first; `*token_type_ids` are those of `text`.
    """

    __slots__ = ("features", "key", "size", "text", "token_ids", "tokens")

    def __init__(
        self, key: str, size: tuple[int, int], text: str, ids: Sequence[int], token_ids: frozenset[int],
        features: dict[str, Any],
    ) -> None:  # fmt: skip
        self.key, self.size, self.text, self.token_ids, self.features = key, size, text, token_ids, features
        self.tokens = sum(i in token_ids for i in ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expansion) and self.key == other.key and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Expansion({self.size[0]}x{self.size[1]}, {self.tokens} tokens, {self.key[:8]})"

    def model_dump(self) -> dict[str, Any]:
        """What a record keeps of it: no features."""
        return {"type": "image", "sha256": self.key, "size": list(self.size), "tokens": self.tokens}


Media = tuple[Expansion, ...]


def tokenizer_and_processor(given: Any) -> tuple[Any, Any | None]:
    """The tokenizer, and the processor around it (anything with `.tokenizer` and `.image_processor`) or None."""
    if getattr(given, "image_processor", None) is not None and hasattr(given, "tokenizer"):
        return given.tokenizer, given
    return given, None


def image_text(render: Callable[[list[Message]], str]) -> str:
    """What a template writes for an image block between two texts; "" where that cannot be told."""
    before, after = "zqbeforeqz", "zqafterqz"
    content = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    try:
        text = render([{"role": "user", "content": content}])
    except ConfigurationError:
        return ""
    start, end = text.find(before), text.find(after)
    return text[start + len(before) : end] if 0 <= start < end else ""


class Images:
    """Writes the images of messages into rendered text.

    The template writes one placeholder per image. Which token that is, is found by behaviour: it is among what one more
    image adds to a prompt, and the processor replaces it.

    Args:
        processor: Of the model; None for a model that sees text only.
        codec: Of the processor's tokenizer.
        render: Text of messages by the chat template in use, without generation prompt.
        model: What error texts call the tokenizer or model.
    """

    def __init__(
        self, processor: Any | None, codec: Codec, render: Callable[[list[Message]], str], model: str = "the tokenizer"
    ) -> None:
        self._processor, self._codec, self._render, self._model = processor, codec, render, model
        self._cache: OrderedDict[str, Expansion] = OrderedDict()
        self._cached_bytes = 0

    @property
    def available(self) -> bool:
        """True where there is a processor."""
        return self._processor is not None

    # --- messages ----------------------------------------------------------------------
    def take(self, messages: Sequence[Message], known: Media = ()) -> tuple[Sequence[Message], Media]:
        """The messages with bare image blocks, and their images in order. The first ones are those `known` already.

        Raises:
            ConfigurationError: An image of the prompt that cannot be shown, or a model without a processor.
            EnvironmentFailed: An image of a tool message that cannot be shown.
        """
        found = list(blocks_of(messages))
        if not found:
            return messages, ()
        if self._processor is None:
            at = found[0][0]
            raise ConfigurationError(
                f"messages[{at}] ({messages[at].get('role')}) holds an image, and {self._model} reads text only: "
                "pass the processor of a model with vision (AutoProcessor.from_pretrained), or describe it as text."
            )
        media = list(known[: len(found)])
        for at, block in found[len(media) :]:
            try:
                media.append(self.expand(open_image(block)))
            except ValueError as e:
                if isinstance(e, ConfigurationError):
                    raise
                raise fault(messages[at], at, str(e)) from e
        return bare(messages), tuple(media)

    def fill(self, text: str, messages: Sequence[Message], media: Media) -> str:
        """The rendered text of `messages` with every placeholder replaced by what stands for its image.

        Raises:
            ConfigurationError: The template wrote another number of placeholders than the messages have images.
        """
        if not media:
            return text
        name = self.placeholder
        places = [at for at, control in self._codec.controls(text) if control == name]
        if len(places) != len(media):
            roles = Counter(str(messages[i].get("role")) for i, _ in blocks_of(messages))
            raise ConfigurationError(_mismatch(len(places), roles))
        starts = [0, *(at + len(name) for at in places)]
        ends = [*places, len(text)]
        parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        return "".join([p + m.text for p, m in zip(parts, media, strict=False)]) + parts[-1]

    # --- one image ---------------------------------------------------------------------
    def expand(self, picture: Any) -> Expansion:
        """What stands for an RGB picture.

        Raises:
            ValueError: The processor refuses the picture; its reason.
        """
        key = hashlib.sha256(f"{picture.mode}{picture.size}".encode() + picture.tobytes()).hexdigest()
        made = self._cache.pop(key, None)
        if made is None:
            made = self._process(picture, self.placeholder, key)
            self._cached_bytes += _size(made)
        self._cache[key] = made
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return made

    def _process(self, picture: Any, placeholder: str, key: str = "") -> Expansion:
        assert self._processor is not None
        try:
            out = dict(self._processor(text=placeholder, images=[picture], add_special_tokens=False))
        except Exception as e:
            raise ValueError(f"the model's processor refuses it ({type(e).__name__}: {e}).") from e
        ids = [int(i) for i in _flat(out.pop("input_ids"))]
        out.pop("attention_mask", None)
        features = {name: _stacked(value) for name, value in out.items()}
        return Expansion(key, picture.size, self._codec.decode(ids), ids, self._token_ids(ids), features)

    def _token_ids(self, ids: list[int]) -> frozenset[int]:
        """The ids that stand for features: as the processor says, else the control token that there is most of."""
        named = getattr(self._processor, "image_token_ids", None) or [getattr(self._processor, "image_token_id", None)]
        if said := frozenset(i for i in ids if i in named):
            return said
        counts = Counter(i for i in ids if i in self._codec.control_ids)
        return frozenset(i for i, _ in counts.most_common(1))

    # --- finding out -------------------------------------------------------------------
    @property
    def placeholder(self) -> str:
        """The control token that the template writes for an image.

        Raises:
            ConfigurationError: The template writes none, or none that the processor knows.
        """
        return self._found[0]

    @functools.cached_property
    def tokens(self) -> frozenset[str]:
        """Control tokens that the template and the processor alone may write: in a message they are always text."""
        if self._processor is None:
            return frozenset()
        try:
            _, made, added = self._found
        except ConfigurationError:  # no images with this template; a message that holds one is refused
            return frozenset()
        inside = {self._codec.text_of([s]) for s in self._codec.segments(made.text) if isinstance(s, int)}
        return frozenset(inside.union(added))

    @functools.cached_property
    def _found(self) -> tuple[str, Expansion, list[str]]:
        """The placeholder, what a blank picture becomes, and all control tokens that the template adds for an image."""
        from PIL import Image

        probe = Image.new("RGB", _PROBE_SIZE, (120, 130, 140))
        name = type(self._processor).__name__
        named = getattr(self._processor, "image_token", None)
        added = self._added()
        for token in sorted(added, key=lambda token: token != named):
            try:
                made = self._process(probe, token)
            except ValueError:
                continue
            if made.tokens and (token == named or made.text != token):
                return token, made, added
        if added:
            raise ConfigurationError(
                f"The chat template writes {' '.join(added)} for an image, and {name} replaces none of that. Pass the "
                "chat template that belongs to the processor."
            )
        raise ConfigurationError(
            f"The chat template writes no token for an image in a user message, though {name} reads images. Pass the "
            "processor's own chat template."
        )

    def _added(self) -> list[str]:
        """Control tokens that one more image adds to a prompt exactly once."""
        counts: list[Counter[str]] = []
        for number in (1, 2):
            content = [*[{"type": "image"}] * number, {"type": "text", "text": "x"}]
            text = self._render([{"role": "user", "content": content}])
            segments = self._codec.segments(text)
            counts.append(Counter(self._codec.text_of([s]) for s in segments if isinstance(s, int)))
        one, two = counts
        return [token for token in two if two[token] - one[token] == 1]


def _mismatch(count: int, roles: Counter[str]) -> str:
    total = sum(roles.values())
    dropped = [role for role, number in roles.items() if count == total - number]
    said = f"The chat template wrote {count} placeholder{'s' if count != 1 else ''} for {total} image"
    said += "s" if total != 1 else ""
    if len(dropped) != 1:
        return f"{said} (roles: {', '.join(sorted(roles))}). Pass a chat_template that writes one for each."
    where = "put the image into a user message" if dropped[0] != "user" else "use the processor's own template"
    return f"{said}: it leaves out those of {dropped[0]} messages. Pass a chat_template that writes them, or {where}."


def _flat(ids: Any) -> Any:
    return ids[0] if len(ids) == 1 and hasattr(ids[0], "__len__") else ids


def _stacked(value: Any) -> Any:
    """Lists of arrays or numbers as one array; arrays and tensors as they are, and lists of unlike arrays too."""
    if not isinstance(value, list):
        return value
    import numpy as np

    try:
        return np.stack([np.asarray(one) for one in value])
    except ValueError:
        return value


def _size(made: Expansion) -> int:
    return sum(int(getattr(value, "nbytes", 0)) for value in made.features.values())

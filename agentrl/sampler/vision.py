"""Images on their way into a model's forward, the same for sampling and for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigurationError
from agentrl.render.images import Expansion

_PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index"))


def placeholder_ids(model: Any) -> tuple[int, ...]:
    """The ids whose embeddings the model replaces by features, as its config names them; none for a model of text.

    A policy never draws them: sampling and training both leave them out of the distribution (`without`). A drawn one
    would be read as an image that is not there.
    """
    config = model.config
    size = config.get_text_config().vocab_size
    named = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(sorted({i for i in named if isinstance(i, int) and 0 <= i < size}))


def vision_parameters(model: Any) -> list[torch.nn.Parameter]:
    """The trained parameters outside the language model: a row of text gives them no gradient."""
    language = [model.get_decoder(), model.get_output_embeddings()]
    inside = {id(p) for module in language if module is not None for p in module.parameters()}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]


def without(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """The logits [..., V] with minus infinity at `ids`.

    >>> without(torch.zeros(1, 3), [1]).softmax(-1)
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    if not ids:
        return logits
    return logits.index_fill(-1, torch.tensor(ids, device=logits.device), -torch.inf)


def check_drawn(targets_N: Tensor, ids: Sequence[int]) -> None:
    """None of the sampled tokens stands for an image.

    Raises:
        ConfigurationError: One does. No distribution of ours holds it, so another engine drew it.
    """
    if not ids or not len(targets_N):
        return
    drawn = targets_N[torch.isin(targets_N, torch.tensor(ids, device=targets_N.device))]
    if len(drawn):
        raise ConfigurationError(
            f"A sampled turn holds the id {int(drawn[0])}, which stands for an image in this model and cannot be "
            f"trained. Let your sampler never draw the ids {list(ids)}."
        )


def features(media: Iterable[Sequence[Expansion]], ids_SL: Tensor) -> dict[str, Tensor]:
    """What a forward needs besides the padded rows `ids_SL`: the images of all rows in order; nothing without images.

    Padding holds no placeholder ids.

    Raises:
        ConfigurationError: The processor lays out images in a way that has not been checked.
        ValueError: Other numbers of placeholder ids and features.
    """
    shown = [image for row in media for image in row]
    if not shown:
        return {}
    stand_ins = sorted(frozenset[int]().union(*(image.token_ids for image in shown)))
    is_image_SL = torch.isin(ids_SL, torch.tensor(stand_ins, device=ids_SL.device))
    found, wanted = int(is_image_SL.sum()), sum(image.tokens for image in shown)
    if found != wanted:
        raise ValueError(f"the rows have {found} placeholder ids for {wanted} image features")
    made: dict[str, Tensor] = {}
    for name in shown[0].features:
        if name.endswith("token_type_ids"):
            made[name] = is_image_SL.long()
        else:
            parts = [torch.as_tensor(image.features[name]) for image in shown]
            _check_layout(name, parts)
            made[name] = torch.cat(parts).to(ids_SL.device)
    return made


def _check_layout(name: str, parts: Sequence[Tensor]) -> None:
    """The images lie one after the other on the first axis."""
    if any(part.dim() > 4 for part in parts) or len({part.shape[1:] for part in parts}) > 1:
        raise ConfigurationError(
            f"The model's processor lays out '{name}' as {list(parts[0].shape)} for one image, which cannot be batched "
            "here (Idefics 3 and SmolVLM do so). Use a model whose images lie one after the other on the first axis, "
            "such as Qwen-VL or Gemma 3."
        )

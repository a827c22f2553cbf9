"""A folder that another engine can load the policy from."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from agentrl.train import setup
from agentrl.train.scratch import Scratch


def checkpoint_folder(model: Any, tokenizer: Any, closers: list[Any], trust_remote_code: bool) -> Path | str:
    """A folder or hub id that another engine can load this model from: where it came from, else one written now.

    Weights come by a sync in any case, so those of the place that it came from need only have the same shapes.
    """
    from transformers import AutoConfig

    bare = setup.bare(model)
    name = getattr(bare.config, "_name_or_path", "") or ""
    if name:
        with contextlib.suppress(OSError, ValueError):
            there = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).to_dict()
            here = bare.config.to_dict()
            differ = [key for key in there if key not in _UNIMPORTANT and there[key] != here.get(key)]
            if not differ and _has_weights(name):
                return name
    folder = Scratch(Path(tempfile.gettempdir()), "agentrl-model-")
    closers.append(folder.close)
    write_checkpoint(model, tokenizer, folder.path)
    return folder.path


_UNIMPORTANT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"}


def _has_weights(name: str) -> bool:
    folder = Path(name).expanduser()
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def write_checkpoint(model: Any, tokenizer: Any, folder: Path) -> None:
    """The folder holds config, tokenizer and the weights of now, adapters merged, as `from_pretrained` reads them."""
    from safetensors.torch import save_file

    from agentrl.train.weights import policy_weights

    bare = setup.bare(model)
    config = type(bare.config).from_dict(bare.config.to_dict())
    config.architectures = [type(bare).__name__]
    config.save_pretrained(folder)
    if bare.can_generate() and bare.generation_config is not None:
        with contextlib.suppress(ValueError):  # one that transformers itself refuses to write
            bare.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in policy_weights(model)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

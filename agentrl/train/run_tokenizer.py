"""A model's tokenizer, from this machine only: nothing is downloaded and no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.errors import ConfigurationError


def local_tokenizer(name: str, *, gguf_file: str | None = None, revision: str | None = None) -> Any:
    """The tokenizer of a folder, or of a hub model that is in the cache.

    Raises:
        ConfigurationError: It is not on this machine, or cannot be read.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kwargs = {key: value for key, value in {"gguf_file": gguf_file, "revision": revision}.items() if value is not None}
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, **kwargs)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others
        where = "folder" if Path(name).is_dir() else "cache of this machine"
        text = str(error).strip().split("\n")[0][:160]
        raise ConfigurationError(f"No tokenizer '{name}' in the {where}: {text}") from error

"""Reward models: sequence-classification models that score completions, called as reward functions are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from agentrl import rewards
from agentrl.errors import ConfigurationError
from agentrl.train.config import GRPOConfig
from agentrl.train.setup import check_folder, context_length, init_kwargs


class RewardModel:
    """Scores a group of completions in one batch: the model's single output for prompt and completion together.

    A conversation is written by the reward model's own chat template, without a generation prompt; plain text is put
    end to end; neither gets further special tokens. NaN counts as not scored, and so does a text that is longer than
    what the model sees (warned about once).
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.__name__ = name
        self._longest = min(context_length(model) or sys.maxsize, tokenizer.model_max_length)
        self._warned = False

    def place(self, accelerator: Any) -> None:
        """The model is on the accelerator's device, in its precision."""
        self.model = accelerator.prepare_model(self.model, device_placement=True, evaluation_mode=True)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | None]:
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        fitting = [i for i, one in enumerate(ids) if one and not self._too_long(len(one))]
        scores = iter(self._scores([ids[i] for i in fitting]) if fitting else ())
        return [next(scores) if i in fitting else None for i in range(len(ids))]

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
        if not self.tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer of reward model '{self.__name__}' has no chat template, and the prompts are "
                "conversations; set its chat_template, or use prompts that are plain text."
            )
        return self.tokenizer.apply_chat_template([*before, *after], tokenize=False)

    @torch.no_grad()
    def _scores(self, ids: list[list[int]]) -> list[float]:
        self.model.eval()
        device, longest = next(self.model.parameters()).device, max(map(len, ids))
        filled = [one + [self.tokenizer.pad_token_id] * (longest - len(one)) for one in ids]
        mask = [[1] * len(one) + [0] * (longest - len(one)) for one in ids]
        logits = self.model(
            input_ids=torch.tensor(filled, device=device), attention_mask=torch.tensor(mask, device=device)
        ).logits
        if logits.shape != (len(ids), 1):
            raise ConfigurationError(
                f"Reward model '{self.__name__}' gave an output of shape {tuple(logits.shape)} for {len(ids)} texts; "
                "it must be a sequence-classification model with num_labels=1."
            )
        return logits[:, 0].float().tolist()

    def _too_long(self, tokens: int) -> bool:
        if tokens <= self._longest:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Reward model '{self.__name__}' sees {self._longest} tokens; a prompt with its completion has "
                f"{tokens} and is not scored by it (nor are later ones that are too long).",
                stacklevel=2,
            )
        return True


def load_reward_models(reward_funcs: Any, processing_classes: Any, args: GRPOConfig) -> list[Any]:
    """The reward functions, each model among them (an id, a path or an instance) as a `RewardModel`.

    Args:
        reward_funcs: One or a list; None: none.
        processing_classes: The tokenizer of the only one, or a list with one entry for each (None: the one saved with
            the model; entries of functions do nothing).
        args: `model_init_kwargs` and `trust_remote_code` reach models that are given by name, and `revision` their
            tokenizers.

    Raises:
        ConfigurationError: A number of tokenizers that does not fit, a model without a tokenizer, or one that cannot
            score.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [] if reward_funcs is None else functions
    if not isinstance(processing_classes, (list, tuple)):
        if processing_classes is not None and len(functions) != 1:
            raise ConfigurationError(
                f"reward_processing_classes is one tokenizer, but there are {len(functions)} reward functions; give a "
                "list with one entry for each, None for those that are no models."
            )
        processing_classes = [processing_classes] * len(functions)
    if len(processing_classes) != len(functions):
        raise ConfigurationError(
            f"reward_processing_classes has {len(processing_classes)} entries for {len(functions)} reward functions; "
            "give one for each, None for those that are no models."
        )
    return [
        _reward_model(function, tokenizer, args) if _is_model(function) else function
        for function, tokenizer in zip(functions, processing_classes, strict=True)
    ]


def place_reward_models(functions: Sequence[Any], accelerator: Any) -> None:
    """Every reward model among the functions is ready to score on this process's device."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.place(accelerator)


def _is_model(function: Any) -> bool:
    return isinstance(function, (str, Path)) or (isinstance(function, torch.nn.Module) and hasattr(function, "config"))


def _reward_model(given: Any, tokenizer: Any, args: GRPOConfig) -> RewardModel:
    where, revision = given, {}
    if isinstance(given, (str, Path)):
        model = _load(str(given), args)
        revision = {key: value for key, value in init_kwargs(args).items() if key == "revision"}
    else:
        model, where = given, getattr(given.config, "_name_or_path", "")
    name = str(where).rstrip("/").rsplit("/", 1)[-1] or type(model).__name__
    labels = getattr(model.config, "num_labels", 1)
    if labels != 1:
        raise ConfigurationError(
            f"Reward model '{name}' ({type(model).__name__}) has {labels} outputs; it must be a "
            "sequence-classification model with num_labels=1."
        )
    if tokenizer is None:
        if not where:
            raise ConfigurationError(
                f"Reward model '{name}' does not know where it was loaded from; pass its tokenizer in "
                "reward_processing_classes."
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(where), trust_remote_code=args.trust_remote_code, **revision)
        except (OSError, ValueError) as e:
            raise ConfigurationError(
                f"No tokenizer can be loaded for reward model '{name}'; pass it in reward_processing_classes."
            ) from e
    _fit(tokenizer, model, name)
    return RewardModel(model, tokenizer, name)


def _load(name: str, args: GRPOConfig) -> Any:
    if name in rewards.__all__:
        raise ConfigurationError(f"'{name}' is a function of agentrl.rewards; pass the function, not its name.")
    check_folder(name)
    kwargs = {"trust_remote_code": args.trust_remote_code} | init_kwargs(args)
    kwargs.pop("gguf_file", None)  # names a file beside the policy
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, output_loading_info=True, **kwargs
        )
    except RuntimeError as e:  # transformers' way to say that sizes differ
        raise ConfigurationError(
            f"Reward model '{name}' cannot be loaded with one output; it must be a sequence-classification model with "
            "num_labels=1."
        ) from e
    if info["missing_keys"]:
        made_up = sorted(info["missing_keys"])[0]
        warnings.warn(
            f"Reward model '{name}' is no trained reward model: its files lack {made_up}, which was made up. Its "
            "scores mean nothing.",
            stacklevel=3,
        )
    return model


def _fit(tokenizer: Any, model: Any, name: str) -> None:
    """Both have the same pad token; every token of the tokenizer has a row in the model."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigurationError(f"The tokenizer of reward model '{name}' has neither a pad nor an end token.")
        tokenizer.pad_token = tokenizer.eos_token
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigurationError(
            f"The tokenizer of reward model '{name}' has {len(tokenizer)} tokens but the model's embedding has {rows}; "
            "pass the tokenizer that belongs to it in reward_processing_classes."
        )
    model.config.pad_token_id = tokenizer.pad_token_id  # the model scores at the last token that is not this one

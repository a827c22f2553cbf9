"""What a trainer is given, made ready: model, tokenizer, reference, environments, tools, reward functions."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    set_seed,
)

from agentrl.errors import ConfigurationError, MissingDependency
from agentrl.mixing import weights_of
from agentrl.pool import EnvironmentPool
from agentrl.pool import make_pools as make_pools  # callers of this file find it here
from agentrl.render import Renderer
from agentrl.render.images import tokenizer_and_processor
from agentrl.rollout.scoring import RewardSource, name_sources
from agentrl.sampler.vision import placeholder_ids
from agentrl.tasks import TaskSource
from agentrl.train.config import GRPOConfig
from agentrl.train.log_probs import router_loss_of, routes

_DROPS = re.compile(r"dropout|pdrop|layerdrop|drop_?(path|prob|rate)")  # how architectures name a probability


def init_kwargs(args: GRPOConfig) -> dict[str, Any]:
    """`model_init_kwargs` as a dict."""
    given = args.model_init_kwargs or {}
    return dict(json.loads(given) if isinstance(given, str) else given)


def check_folder(model: str | Path) -> None:
    """A name that can only be a folder is one.

    Raises:
        ConfigurationError: There is no such folder.
    """
    if str(model).startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigurationError(f"There is no folder '{model}' to load a model from.")


def load_model(model: str | PreTrainedModel, args: GRPOConfig, quantization_config: Any = None) -> Any:
    """The model; a string is loaded in float32 unless `model_init_kwargs` names a dtype.

    Raises:
        ConfigurationError: Neither a string nor a causal language model.
    """
    if isinstance(model, (str, Path)):
        check_folder(model)
        kwargs = {"dtype": torch.float32, "trust_remote_code": args.trust_remote_code} | init_kwargs(args)
        if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
            kwargs["dtype"] = _dtype(kwargs["dtype"])
        if quantization_config is not None:
            kwargs["quantization_config"] = quantization_config
        loaded = _from_pretrained(str(model), kwargs)
        return _trainable(loaded) if kwargs.get("gguf_file") else loaded
    if quantization_config is not None:
        warnings.warn("quantization_config is ignored: the model is already loaded.", stacklevel=3)
    if args.model_init_kwargs:
        warnings.warn("model_init_kwargs is ignored: the model is already loaded.", stacklevel=3)
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ConfigurationError(
            f"model must be a model id, a path or a transformers model, not a {type(model).__name__}."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigurationError("model must be a causal (decoder-only) language model; this one has an encoder.")
    return model


def _from_pretrained(name: str, kwargs: dict[str, Any]) -> Any:
    """A causal language model; one with vision where that is the only kind there is of it."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)
    except ValueError:
        known = {key: kwargs[key] for key in ("revision", "trust_remote_code", "gguf_file") if key in kwargs}
        if type(AutoConfig.from_pretrained(name, **known)) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise
    return AutoModelForImageTextToText.from_pretrained(name, **kwargs)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_router(model: Any, args: GRPOConfig) -> float:
    """The weight of the load-balancing loss: the option's, else that of the model's own config; 0 where there is none.

    Raises:
        ConfigurationError: The option on a model that is no mixture of experts, or on one for which transformers has
            no such loss.
    """
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    given = args.router_aux_loss_coef
    if given == 0.0 and any(getattr(model.config.get_text_config(), name, None) for name in _EXPERTS):
        return 0.0  # some configs of mixtures of experts do not name the coefficient
    if given is not None and own is None:
        raise ConfigurationError("router_aux_loss_coef is set but the model is no mixture of experts; leave it out.")
    coef = own if given is None else given
    if not coef:
        return 0.0
    causal = bare(model)
    asked = routes(causal)
    if asked and router_loss_of(causal) is not None:
        if args.token_budget is not None:
            raise ConfigurationError(
                "token_budget cannot be kept with a load-balancing loss: each micro-batch is a row of its own there. "
                "Leave it out and lower per_device_train_batch_size, or set router_aux_loss_coef=0.0."
            )
        return float(coef)
    if given is None and not asked:
        return 0.0  # the config of a family whose other members are mixtures of experts
    why = "transformers has no load-balancing loss for it" if asked else "it gives no router logits"
    raise ConfigurationError(
        f"router_aux_loss_coef={coef} does not work with {type(causal).__name__}: {why}. Set router_aux_loss_coef=0.0 "
        "to train without that loss."
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(f"model_init_kwargs names the dtype '{name}'; write 'float32', 'bfloat16' or 'auto'.")
    return found


def _trainable(read: Any) -> Any:
    """The weights of a model that was read from GGUF in a fresh one.

    transformers expands such weights, but still takes the model for a quantized one that can be neither trained nor
    saved.
    """
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(read)(type(read.config)(**settings)).to(read.dtype)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model


def load_tokenizer(processing_class: Any, model: Any, args: GRPOConfig) -> Any:
    """The tokenizer, or the processor of a model with vision; by default the one saved with the model.

    A missing pad token becomes the end token.

    Raises:
        ConfigurationError: It does not fit the model, or is not known.
    """
    if isinstance(processing_class, (str, Path)):
        raise ConfigurationError(
            f"processing_class must be a tokenizer or processor, not a {type(processing_class).__name__}: pass "
            f"AutoTokenizer.from_pretrained({str(processing_class)!r})."
        )
    if processing_class is None:
        name = getattr(model.config, "_name_or_path", "") or ""
        if not name:
            raise ConfigurationError(
                "The model does not know where it was loaded from; pass processing_class=tokenizer."
            )
        kwargs = {key: value for key, value in init_kwargs(args).items() if key == "revision"}
        kwargs["trust_remote_code"] = args.trust_remote_code
        processing_class = _saved_processor(name, kwargs) if placeholder_ids(bare(model)) else None
        processing_class = processing_class or AutoTokenizer.from_pretrained(name, **kwargs)
    tokenizer, processor = tokenizer_and_processor(processing_class)
    if processor is not None and not placeholder_ids(bare(model)):
        raise ConfigurationError(
            f"{type(bare(model)).__name__} reads text only, but processing_class is a {type(processor).__name__}. Pass "
            "the model with its vision (AutoModelForImageTextToText.from_pretrained), or, to train on text, the "
            "tokenizer inside the processor: processing_class=processor.tokenizer."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigurationError(
            f"The tokenizer has {len(tokenizer)} tokens but the model's embedding has {rows}; call "
            "model.resize_token_embeddings(len(tokenizer)), or pass the tokenizer that belongs to the model."
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigurationError("The tokenizer has neither a pad token nor an end token; set one of them.")
        tokenizer.pad_token = tokenizer.eos_token
    return processing_class


def _saved_processor(name: str, kwargs: dict[str, Any]) -> Any | None:
    """The processor saved with a model; None where there is none, or a package is missing that it needs."""
    try:
        return AutoProcessor.from_pretrained(name, **kwargs)
    except (OSError, ValueError, ImportError) as error:
        warnings.warn(f"Images cannot be read, because the processor of {name} cannot be loaded: {error}", stacklevel=4)
        return None


def template_text(asked: str | None) -> str | None:
    """The `chat_template` of the options, with the path of a file replaced by its text.

    Raises:
        ConfigurationError: No such file, or a word that is neither "original" nor a template.
    """
    if asked is None or asked == "original":
        return asked
    if asked.endswith((".jinja", ".jinja2")):
        file = Path(asked).expanduser()
        if not file.is_file():
            raise ConfigurationError(f"chat_template={asked!r}: there is no such file.")
        return file.read_text(encoding="utf-8")
    if "{" not in asked:
        raise ConfigurationError(
            f"chat_template={asked!r} is neither 'original', nor the text of a template, nor the path of a .jinja file."
        )
    return asked


def make_renderer(tokenizer: Any, args: GRPOConfig, *, with_tools: bool) -> Renderer:
    """Renders for the chat template that the options ask for.

    Raises:
        ConfigurationError: There is no such file, or the template cannot be used.
    """
    kwargs = args.chat_template_kwargs or {}
    return Renderer(
        tokenizer,
        chat_template=template_text(args.chat_template),
        chat_template_kwargs=dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs),
        with_tools=with_tools,
    )


def wrap_peft(model: Any, peft_config: Any, seed: int) -> Any:
    """The model with a fresh adapter, drawn from `seed`, or as it is.

    Raises:
        ConfigurationError: A kind of adapter that cannot be trained here, or nothing to train.
    """
    model = _wrapped(model, peft_config, seed)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            "No parameter of the model requires a gradient, so nothing would be trained. Load an adapter with "
            "is_trainable=True, leave inference_mode out of peft_config, or call model.requires_grad_(True)."
        )
    return model


def _wrapped(model: Any, peft_config: Any, seed: int) -> Any:
    if peft_config is None:
        return model
    if isinstance(peft_config, dict):
        raise ConfigurationError("peft_config must be a configuration of peft, such as LoraConfig(r=16), not a dict.")
    try:
        from peft import PeftModel, get_peft_model
    except ImportError:
        raise MissingDependency("peft", "peft", "peft_config") from None
    if isinstance(model, PeftModel):
        raise ConfigurationError("The model already has an adapter; leave peft_config out, or pass the base model.")
    if getattr(peft_config, "is_prompt_learning", False):
        raise ConfigurationError(
            f"{type(peft_config).__name__} puts virtual tokens before the prompt, which sampling and training here do "
            "not know; use an adapter inside the layers, such as LoraConfig."
        )
    set_seed(seed)  # as the Trainer does, which comes later
    return get_peft_model(model, peft_config)


def bare(model: Any) -> PreTrainedModel:
    """The transformers model under a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def silence_dropout(model: torch.nn.Module) -> None:
    """Every dropout of the model is 0, whole layers and paths included."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _silence(module, seen)


def _silence(holder: Any, seen: set[int]) -> None:
    """Dropout probabilities among the attributes of a module or a config, and of the configs in it, are 0."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, float) and _DROPS.search(name):
            setattr(holder, name, 0.0)
        elif isinstance(value, PreTrainedConfig):
            _silence(value, seen)


def row_multiple(args: GRPOConfig) -> int:
    """What the number of tokens in a training row is a multiple of: `pad_to_multiple_of`, resolved."""
    if args.pad_to_multiple_of == "auto":
        return 128 if args.device.type == "neuron" else 1  # it compiles once per shape
    return int(args.pad_to_multiple_of or 1)


def context_length(model: Any) -> int | None:
    """Tokens that the model can see, where its config says so."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def task_source(
    dataset: Any, factory: Any, args: GRPOConfig, *, seed: int, order_seed: int | None = None, shuffle: bool = False
) -> TaskSource:
    """The rows of a dataset (None: what the environment makes) for the environments of `factory`."""
    return TaskSource(
        dataset, seed=seed, order_seed=order_seed, shuffle=shuffle, environments=weights_of(factory),
        prompt_required=factory is None,
        columns=("prompt", "environment") if args.remove_unused_columns else None,
    )  # fmt: skip


def make_sources(
    reward_funcs: Any, weights: Sequence[float] | None, pools: Mapping[str | None, EnvironmentPool]
) -> tuple[list[RewardSource], dict[str, float]]:
    """The reward functions, and the weight of every source by name: environments first, with weight 1.

    Raises:
        ConfigurationError: No source of reward at all, or a kind of source that is not available.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [] if reward_funcs is None else functions
    environments = list(dict.fromkeys(pool.name for pool in pools.values() if pool.has_reward))
    sources = name_sources(functions, weights, taken=environments)
    if not sources and not environments:
        raise ConfigurationError(
            "There is no source of reward: pass reward_funcs, or an environment_factory whose class has get_reward()."
        )
    return sources, dict.fromkeys(environments, 1.0) | {source.name: source.weight for source in sources}

"""`GRPOConfig`: flat, with the field's usual names, because users' scripts have them."""

# ruff: noqa: RUF009 (`_option` makes a dataclass field, which ruff cannot see)
from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from agentrl.errors import ConfigurationError
from agentrl.objective import LossConfig, check_scaling
from agentrl.rollout.scoring import check_weights
from agentrl.train.correction import SamplerCorrection
from agentrl.train.engine_options import check_engine, table
from agentrl.train.entropy import EntropySettings, entropy_settings
from agentrl.train.options import check_unavailable
from agentrl.types import Deadlines


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class GRPOConfig(TrainingArguments):
    """Settings of `GRPOTrainer`: all of ``transformers.TrainingArguments`` and what follows.

    Defaults adapt to the machine: without an accelerator, nothing has to be set (fp32, no pinned memory). Defaults
    that differ from ``TrainingArguments``: `learning_rate` 1e-6, `logging_steps` 10, `gradient_checkpointing` True,
    `bf16` True where the accelerator has it and `fp16` is not set, `remove_unused_columns` False.

    Raises:
        ConfigurationError: A value out of range, two options that exclude each other, or an option that this version
            does not have yet (it is refused, never ignored).
    """

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "transformers_continuous_batching_config",
    ]

    # --- changed defaults ---
    learning_rate: float = _option(1e-6, "Initial learning rate of AdamW.")
    bf16: bool | None = _option(None, "bf16 mixed precision; None: where the accelerator has it and fp16 is not set.")
    gradient_checkpointing: bool = _option(True, "Recompute activations in the backward pass to save memory.")
    logging_steps: float = _option(10, "Log every so many optimizer steps.")
    remove_unused_columns: bool | None = _option(  # pyright: ignore[reportIncompatibleVariableOverride]
        False, "Keep only the columns 'prompt' and 'environment'."
    )

    # --- model ---
    model_init_kwargs: dict[str, Any] | str | None = _option(
        None, "Keyword arguments of from_pretrained when the model is a string; `revision` also reaches the tokenizer."
    )
    trust_remote_code: bool = _option(False, "Allow models and tokenizers that bring their own Python code.")
    router_aux_loss_coef: float | None = _option(
        None, "Weight of a mixture-of-experts model's load-balancing loss; None: the model's own value."
    )
    disable_dropout: bool = _option(False, "Set every dropout of the policy to 0.")
    cast_lm_head_to_fp32: bool = _option(False, "Compute the output layer in fp32 (untied embeddings only).")

    # --- data ---
    num_generations: int | None = _option(8, "Rollouts per prompt: the size of a group.")
    num_generations_eval: int | None = _option(None, "Rollouts per prompt in evaluation; None: num_generations.")
    max_completion_length: int | None = _option(
        512, "Tokens of a whole completion, tool results included; None: what the model's context leaves."
    )
    ds3_gather_for_generation: bool = _option(True, "Gather ZeRO-3 weights for generation.")
    shuffle_dataset: bool | None = _option(True, "Give each epoch its own order.")
    pad_to_multiple_of: int | str | None = _option(
        "auto", "Pad rows of training to a multiple of this many tokens; 'auto': 128 on Neuron, no padding elsewhere."
    )

    # --- generation ---
    generation_batch_size: int | None = _option(
        None, "Rollouts per generation phase; None: batch size x processes x steps_per_generation."
    )
    token_budget: int | None = _option(
        None,
        "Tokens of a row, shared ones counted once; None: batch size x the longest sample. Longer ones are dropped.",
    )
    steps_per_generation: int | None = _option(
        None, "Micro-batches per generation phase; None: gradient_accumulation_steps."
    )
    temperature: float = _option(1.0, "Sampling temperature; log-probs are of logits / temperature.")
    top_p: float = _option(1.0, "Nucleus sampling: probability mass to sample from, in (0, 1].")
    top_k: int = _option(0, "Sample from the k most likely tokens; 0: all.")
    min_p: float | None = _option(None, "Least probability of a token, relative to the most likely one, in [0, 1].")
    generation_kwargs: dict | str | None = _option(None, "More keyword arguments for generation.")
    chat_template_kwargs: dict | str | None = _option(None, "Keyword arguments of the chat template.")
    chat_template: str | None = _option(
        None,
        "None: the tokenizer's own, or a training template that writes the same prompts; 'original': its own in any "
        "case, turns may fork; else the text of a template, or the path of a .jinja file.",
    )
    repetition_penalty: float = _option(1.0, "Above 1: makes tokens of the prompt and the text so far less likely.")
    cache_implementation: str | None = _option(None, "Cache class of transformers' generate.")

    # --- vLLM ---
    use_vllm: bool = _option(False, "Generate with vLLM.")
    vllm_mode: str = _option("colocate", "'colocate' (in the trainer's process) or 'server'.")
    vllm_model_impl: str = _option("vllm", "Model implementation inside vLLM: 'vllm' or 'transformers'.")
    vllm_enable_sleep_mode: bool = _option(False, "Offload vLLM's weights and cache during the optimizer step.")
    vllm_structured_outputs_regex: str | None = _option(None, "Regular expression that outputs must match.")
    vllm_server_base_url: str | None = _option(None, "URL of the vLLM server; replaces host and port.")
    vllm_server_host: str = _option("0.0.0.0", "Host of the vLLM server.")
    vllm_server_port: int = _option(8000, "Port of the vLLM server.")
    vllm_server_timeout: float = _option(240.0, "Seconds to wait for the vLLM server.")
    vllm_group_port: int = _option(51216, "Port of the weight-update group.")
    vllm_gpu_memory_utilization: float = _option(0.3, "Share of GPU memory for vLLM in colocate mode.")
    vllm_max_model_length: int | None = _option(None, "Context length of vLLM.")
    vllm_tensor_parallel_size: int = _option(1, "Tensor parallelism of vLLM in colocate mode.")

    # --- objective ---
    beta: float = _option(0.0, "KL coefficient; 0: no reference model is loaded.")
    num_iterations: int = _option(1, "How often each generation batch is trained on.")
    epsilon: float = _option(0.2, "Clip bound of the ratio below (and above, unless epsilon_high is set).")
    delta: float | None = _option(None, "Upper bound of the ratio in two-sided clipping; above 1 + epsilon.")
    epsilon_high: float | None = _option(None, "Clip bound above; None: epsilon (5.0 for cispo).")
    sapo_temperature_neg: float = _option(1.05, "SAPO's gate temperature for advantages <= 0.")
    sapo_temperature_pos: float = _option(1.0, "SAPO's gate temperature for advantages > 0.")
    vespo_k_pos: float = _option(2.0, "VESPO's power for advantages >= 0.")
    vespo_lambda_pos: float = _option(3.0, "VESPO's decay for advantages >= 0.")
    vespo_k_neg: float = _option(3.0, "VESPO's power for advantages < 0.")
    vespo_lambda_neg: float = _option(2.0, "VESPO's decay for advantages < 0.")
    importance_sampling_level: str = _option("token", "'token' or 'sequence' (one ratio per rollout, GSPO).")
    reward_weights: list[float] | None = _option(None, "One weight per reward function; None: all 1.")
    multi_objective_aggregation: str = _option(
        "sum_then_normalize", "'sum_then_normalize' or 'normalize_then_sum' (GDPO)."
    )
    scale_rewards: str = _option("group", "'group' (or True), 'batch', or 'none' (or False): the std to divide by.")
    loss_type: str = _option("dapo", "grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo or vespo.")
    mask_truncated_completions: bool = _option(False, "Leave truncated rollouts out of the loss and its normaliser.")
    sync_ref_model: bool = _option(False, "Move the reference model towards the policy now and then.")
    ref_model_mixup_alpha: float = _option(0.6, "Share of the policy in that move.")
    ref_model_sync_steps: int = _option(512, "Optimizer steps between those moves.")
    top_entropy_quantile: float = _option(1.0, "Share of the highest-entropy tokens that the policy term keeps.")
    entropy_coef: float = _option(0.0, "Coefficient of the entropy bonus.")
    use_adaptive_entropy: bool = _option(False, "Steer entropy_coef towards entropy_target.")
    entropy_coef_min: float = _option(0.0, "Least adaptive coefficient.")
    entropy_coef_max: float = _option(1.0, "Largest adaptive coefficient.")
    entropy_coef_delta: float = _option(0.005, "Change of the adaptive coefficient per optimizer step.")
    entropy_target: float = _option(0.2, "Entropy (nats per token) that the adaptive coefficient aims at.")
    max_tool_calling_iterations: int | None = _option(
        None, "Turns whose tool calls are run; 0: never; None: until the model stops or the budget ends."
    )
    vllm_importance_sampling_correction: bool = _option(
        True, "Weigh rollouts for the mismatch between the trainer and the engine that sampled them (vLLM or another)."
    )
    vllm_importance_sampling_mode: str = _option(
        "sequence_mask", "'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'."
    )
    vllm_importance_sampling_clip_max: float | None = _option(3.0, "Upper bound of that correction; None: none.")
    vllm_importance_sampling_clip_min: float | None = _option(None, "Lower bound of that correction; None: none.")
    off_policy_mask_threshold: float | None = _option(
        None,
        "Rollouts with negative advantage whose mean log-ratio to the sampler exceeds this lose their policy term.",
    )
    use_bias_correction_kl: bool = _option(True, "Multiply the KL term by the importance ratio.")

    # --- logging ---
    log_completions: bool = _option(False, "Print a sample of completions every logging_steps.")
    log_multimodal: bool = _option(True, "Log images with the completions.")
    num_completions_to_print: int | None = _option(None, "How many completions to print; None: all.")
    log_unique_prompts: bool = _option(False, "Print one completion per prompt.")
    log_completions_hub_repo: str | None = _option(None, "Hub repository for completions.")

    # --- transformers' continuous batching ---
    use_transformers_continuous_batching: bool = _option(False, "Generate with transformers' own batching engine.")
    transformers_continuous_batching_config: dict | str | None = _option(None, "Its settings.")

    # --- deprecated ---
    use_transformers_paged: bool = _option(False, "Deprecated: use_transformers_continuous_batching.")
    vllm_importance_sampling_cap: float | None = _option(None, "Deprecated: vllm_importance_sampling_clip_max.")

    # --- agentrl's own ---
    reset_timeout: float | None = _option(60.0, "Seconds that an environment's reset may take; None: no limit.")
    tool_timeout: float | None = _option(60.0, "Seconds that one tool call may take; None: no limit.")
    reward_timeout: float | None = _option(60.0, "Seconds that an environment's get_reward may take; None: no limit.")
    turn_timeout: float | None = _option(1800.0, "Seconds that sampling one turn may take; None: no limit.")
    episode_timeout: float | None = _option(3600.0, "Seconds that one episode may take; None: no limit.")
    rollout_attempts: int = _option(3, "Tries of a rollout whose environment fails, each on a fresh instance.")
    min_group_survivors: int = _option(2, "Rollouts of a group that must survive; fewer: the group is dropped.")
    max_failures_in_row: int = _option(16, "Failed rollouts in a row that stop the run.")
    record_episodes: bool = _option(True, "Write every episode as one JSON line to <output_dir>/episodes.jsonl.")

    def __post_init__(self) -> None:
        self._map_deprecated()
        # without the flag, transformers takes a process that torchrun started on a CPU machine for a run of its own
        self.use_cpu = self.use_cpu or not _has_accelerator()
        accelerator = not self.use_cpu
        if self.bf16 is None:
            self.bf16 = not self.fp16 and accelerator and _has_bf16()  # pyright: ignore[reportIncompatibleVariableOverride]
        self.dataloader_pin_memory = self.dataloader_pin_memory and accelerator
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if str(self.pad_to_multiple_of).isdigit():  # from a command line
            self.pad_to_multiple_of = int(str(self.pad_to_multiple_of))
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model, self.greater_is_better = "reward", True  # there is no loss in evaluation
        if self.fp16 and not accelerator:
            raise ConfigurationError(
                "fp16=True needs an accelerator: without one the sampler would run in fp16 and training in fp32. Set "
                "bf16=True, or leave both out."
            )
        check_unavailable(self)  # before transformers looks for packages that these options need
        for name in self._VALID_DICT_FIELDS[len(TrainingArguments._VALID_DICT_FIELDS) :]:
            setattr(self, name, table(getattr(self, name), name) or getattr(self, name))  # from a command line: JSON
        super().__post_init__()
        check_unavailable(self)  # and what it made of the others
        self._check_ranges()
        self._resolve_generation_batch()
        self._warn_of_idle()

    def _map_deprecated(self) -> None:
        if self.use_transformers_paged:
            warnings.warn(
                "use_transformers_paged is deprecated; use use_transformers_continuous_batching.", FutureWarning, 3
            )
            self.use_transformers_continuous_batching, self.use_transformers_paged = True, False
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "vllm_importance_sampling_cap is deprecated; use vllm_importance_sampling_clip_max.", FutureWarning, 3
            )
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
            self.vllm_importance_sampling_cap = None

    def _check_ranges(self) -> None:
        checks = [
            (
                self.num_generations is not None and self.num_generations >= 2,
                "num_generations must be at least 2: a group of one has nothing to be compared with",
            ),
            (
                self.num_generations_eval is None or self.num_generations_eval >= 1,
                "num_generations_eval must be at least 1",
            ),
            (
                self.max_completion_length is None or self.max_completion_length >= 1,
                "max_completion_length must be at least 1, or None",
            ),
            (
                self.max_tool_calling_iterations is None or self.max_tool_calling_iterations >= 0,
                "max_tool_calling_iterations must be 0 (tools never run) or more, or None",
            ),
            (
                self.steps_per_generation is None or self.steps_per_generation >= 1,
                "steps_per_generation must be at least 1",
            ),
            (self.token_budget is None or self.token_budget >= 2, "token_budget must be at least 2, or None"),
            (self.rollout_attempts >= 1, "rollout_attempts must be at least 1"),
            (self.max_failures_in_row >= 1, "max_failures_in_row must be at least 1"),
            (
                all(t is None or t > 0 for t in dataclasses.astuple(self.deadlines())),
                "reset_, tool_, reward_, turn_ and episode_timeout must be above 0, or None",
            ),
            (self.num_iterations >= 1, "num_iterations must be at least 1"),
            (0 < self.temperature < math.inf, "temperature must be above 0 (training needs a distribution) and finite"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (isinstance(self.top_k, int) and self.top_k >= 0, "top_k must be a whole number: 0 (off) or more"),
            (self.min_p is None or 0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty must be above 0 and finite"),
            (
                self.pad_to_multiple_of in ("auto", None)
                or (isinstance(self.pad_to_multiple_of, int) and self.pad_to_multiple_of >= 1),
                "pad_to_multiple_of must be a whole number of at least 1, 'auto' or None",
            ),
            (self.beta >= 0, "beta must be 0 or more"),
            (not self.sync_ref_model or self.beta > 0, "sync_ref_model needs beta > 0: else there is no reference"),
            (0 <= self.ref_model_mixup_alpha <= 1, "ref_model_mixup_alpha must be in [0, 1]"),
            (self.ref_model_sync_steps >= 1, "ref_model_sync_steps must be at least 1"),
            (
                self.sync_ref_model or (self.ref_model_mixup_alpha, self.ref_model_sync_steps) == (0.6, 512),
                "ref_model_mixup_alpha and ref_model_sync_steps do nothing without sync_ref_model=True",
            ),
            (
                self.router_aux_loss_coef is None or 0 <= self.router_aux_loss_coef < float("inf"),
                "router_aux_loss_coef must be 0 or more and finite, or None",
            ),
            (
                self.loss_type != "dr_grpo" or self.max_completion_length is not None,
                "loss_type 'dr_grpo' divides by max_completion_length, so it cannot be None",
            ),
        ]
        for fine, text in checks:
            if not fine:
                raise ConfigurationError(f"{text}.")
        check_weights(self.reward_weights)
        check_scaling(self.scale_rewards, self.multi_objective_aggregation)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trainer makes it again, and shows them
            self.loss_config()
        self.entropy_settings()
        self.sampler_correction()
        check_engine(self)

    def _warn_of_idle(self) -> None:
        """Says which options were set that do nothing beside the others (a sweep over losses may keep them)."""
        correction = tuple(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))
        vespo = tuple(f"vespo_{name}_{sign}" for sign in ("pos", "neg") for name in ("k", "lambda"))
        loss = f"loss_type={self.loss_type!r}"
        idle: list[tuple[bool, tuple[str, ...], str]] = [
            (self.loss_type != "sapo", ("sapo_temperature_pos", "sapo_temperature_neg"), loss),
            (self.loss_type != "vespo", vespo, loss),
            (self.loss_type in ("cispo", "sapo", "vespo"), ("epsilon",), loss),
            (self.beta == 0, ("use_bias_correction_kl",), "beta=0"),
            (not self.vllm_importance_sampling_correction, correction, "vllm_importance_sampling_correction=False"),
        ]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for applies, names, because in idle:
            for name in names:
                if applies and getattr(self, name) != defaults[name]:
                    warnings.warn(f"{name}={getattr(self, name)!r} has no effect with {because}.", stacklevel=4)

    def deadlines(self) -> Deadlines:
        """The seconds that each stage of an episode may take."""
        return Deadlines(
            self.reset_timeout, self.tool_timeout, self.reward_timeout, self.turn_timeout, self.episode_timeout
        )

    def loss_config(self) -> LossConfig:
        """The numbers of the loss, checked."""
        return LossConfig(
            loss_type=self.loss_type,  # type: ignore[arg-type]
            epsilon=self.epsilon, epsilon_high=self.epsilon_high, delta=self.delta,
            importance_sampling_level=self.importance_sampling_level,  # type: ignore[arg-type]
            sapo_temperature_pos=self.sapo_temperature_pos, sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos, vespo_lambda_pos=self.vespo_lambda_pos, vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg, beta=self.beta, use_bias_correction_kl=self.use_bias_correction_kl,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
        )  # fmt: skip

    def entropy_settings(self) -> EntropySettings:
        """The entropy quantile and the entropy bonus, checked."""
        steering = {name: getattr(self, f"entropy_{name}") for name in ("coef_min", "coef_max", "coef_delta", "target")}
        return entropy_settings(self.top_entropy_quantile, self.entropy_coef, self.use_adaptive_entropy, **steering)

    def sampler_correction(self) -> SamplerCorrection | None:
        """The correction for rollouts of another engine, checked; None where it is off."""
        if not self.vllm_importance_sampling_correction:
            return None
        return SamplerCorrection(
            self.vllm_importance_sampling_mode,  # type: ignore[arg-type]
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )

    def _resolve_generation_batch(self) -> None:
        """`generation_batch_size` and `steps_per_generation` both stand, one derived from the other."""
        per_step = self.per_device_train_batch_size * self.world_size
        both = self.generation_batch_size is not None and self.steps_per_generation is not None
        if both and self.generation_batch_size != per_step * (self.steps_per_generation or 0):
            raise ConfigurationError(
                f"generation_batch_size={self.generation_batch_size} and steps_per_generation="
                f"{self.steps_per_generation} exclude each other, as a micro-batch of all processes has {per_step} "
                "rollouts; set one, and the other to None."
            )
        if self.generation_batch_size is None:
            self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps
            self.generation_batch_size = per_step * self.steps_per_generation
        elif self.generation_batch_size % per_step:
            raise ConfigurationError(
                f"generation_batch_size ({self.generation_batch_size}) must be a multiple of "
                f"per_device_train_batch_size x processes ({per_step})."
            )
        else:
            self.steps_per_generation = self.generation_batch_size // per_step
        group = self.num_generations or 1
        if self.generation_batch_size % group:
            fitting = [n for n in range(2, self.generation_batch_size + 1) if self.generation_batch_size % n == 0]
            raise ConfigurationError(
                f"num_generations ({group}) must divide the generation batch of {self.generation_batch_size} rollouts "
                f"(per_device_train_batch_size x processes x steps_per_generation). Dividing values: {fitting}."
            )


def _has_accelerator() -> bool:
    return torch.cuda.is_available() or torch.backends.mps.is_available() or _other_accelerator()


def _other_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", None)
    return bool(accelerator is not None and accelerator.is_available())


def _has_bf16() -> bool:
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else False

"""`GRPOTrainer`: plays, scores and trains, on the loop of `transformers.Trainer`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from agentrl.errors import ConfigurationError
from agentrl.mixing import check_weights
from agentrl.objective import clip_summary
from agentrl.pool import EnvironmentPool
from agentrl.record import EpisodeWriter, begin_record
from agentrl.rollout.engine import RolloutSettings
from agentrl.rollout.group import GroupPlan
from agentrl.rollout.loop import LoopThread
from agentrl.tasks import TaskSource, derive_seed, from_frame, is_sized
from agentrl.tool_schema import build_tools
from agentrl.train import setup
from agentrl.train.buffer import RolloutBuffer
from agentrl.train.config import GRPOConfig
from agentrl.train.engine_options import drawn_from
from agentrl.train.entropy import EntropyControl
from agentrl.train.evaluate import evaluate, prepare_eval_data
from agentrl.train.generation import AdvantageSettings
from agentrl.train.guard import check_step
from agentrl.train.head import cast_head_to_fp32
from agentrl.train.log_probs import PolicyForward
from agentrl.train.metrics import MetricWindow, Reported
from agentrl.train.player import Player
from agentrl.train.policy_sampler import make_policy_sampler
from agentrl.train.printing import log_completions
from agentrl.train.reference import keep_reference
from agentrl.train.reward_models import load_reward_models, place_reward_models
from agentrl.train.schedule import Schedule
from agentrl.train.sharing import sharing_of, sharing_text
from agentrl.train.short_log import say, shorten
from agentrl.train.speed import StepClock
from agentrl.train.step import StepBatch, StepRunner, row_budget
from agentrl.types import RolloutGroup, SamplingParams


class GRPOTrainer(Trainer):
    """Trains a causal language model with Group Relative Policy Optimization (arXiv 2402.03300).

    Args:
        model: Model id or path (loaded in float32 unless told otherwise), a transformers model, or a PeftModel.
        reward_funcs: One reward function or a list; a model id, a path or a sequence-classification model with one
            output is a reward model. Functions are called by name with `prompts`, `completions`, `completion_ids`,
            `trainer_state`, `log_extra`, `log_metric`, `environments` (with an environment) and the dataset's other
            columns; returns one number or None per completion. May be left out where the environment scores itself.
        args: A `GRPOConfig`.
        train_dataset: Rows with a ``prompt`` (text or messages) and any other columns. May be left out with an
            environment that writes its own prompts; `max_steps` is then required, as for iterable data.
        eval_dataset: The same for evaluation; or a dict of several.
        processing_class: The tokenizer, or the processor of a model that sees images; by default the one saved with the
            model.
        reward_processing_classes: The tokenizer of the only reward model, or a list with one entry per reward function
            (None: the one saved with the model).
        callbacks: As in `transformers.Trainer`.
        optimizers: As in `transformers.Trainer`.
        quantization_config: Used when the model is a string.
        peft_config: Trains an adapter of this kind.
        tools: Functions that the model may call, sync or async, with type hints and a Google-style docstring.
        rollout_func: Generates instead of the engine: ``f(prompts, trainer)`` returns a dict with ``prompt_ids``,
            ``completion_ids`` and ``logprobs``, `num_generations` for each prompt; more fields reach the rewards.
        environment_factory: A class, a function that builds an environment, a registered id, an `EnvironmentSpec` with
            settings of its own, or a dict of these by the names in the dataset's ``environment`` column.

    Raises:
        ConfigurationError: Anything that cannot work, as far as it can be known before the first episode.
    """

    _tag_names = ["agentrl", "grpo"]  # noqa: RUF012

    def __init__(
        self,
        model: str | PreTrainedModel | Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        args = GRPOConfig() if args is None else args
        if not isinstance(args, GRPOConfig):
            raise ConfigurationError(f"args must be a GRPOConfig, not a {type(args).__name__}.")
        self.loss_config = args.loss_config()
        train_dataset = from_frame(train_dataset)
        pools = setup.make_pools(environment_factory)
        reward_funcs = load_reward_models(reward_funcs, reward_processing_classes, args)
        sources, weights = setup.make_sources(reward_funcs, args.reward_weights, pools)
        self.tasks = _task_source(train_dataset, args, environment_factory)
        self.environment_factory = environment_factory
        eval_dataset = prepare_eval_data(eval_dataset, environment_factory, args)
        standalone = build_tools(tools)
        policy = setup.load_model(model, args, quantization_config)
        router_coef = setup.check_router(policy, args)
        tokenizer = setup.load_tokenizer(processing_class, policy, args)
        policy = setup.wrap_peft(policy, peft_config, args.seed)
        if args.disable_dropout:
            setup.silence_dropout(policy)
        if args.cast_lm_head_to_fp32:
            cast_head_to_fp32(setup.bare(policy))
        if args.gradient_checkpointing and args.gradient_checkpointing_kwargs is None:
            args.gradient_checkpointing_kwargs = {"use_reentrant": False}
        super().__init__(
            model=policy, args=args, data_collator=list,  # type: ignore[arg-type]
            train_dataset=train_dataset, eval_dataset=[] if eval_dataset is None else eval_dataset,  # type: ignore[arg-type]
            processing_class=tokenizer, callbacks=callbacks, optimizers=optimizers,
        )  # fmt: skip
        self.args: GRPOConfig = args
        self.eval_dataset = eval_dataset  # None: an environment's own episodes
        self._refuse_sharding()
        place_reward_models(reward_funcs, self.accelerator)
        with_tools = bool(standalone) or any(pool.tools for pool in pools.values())
        self.renderer = setup.make_renderer(tokenizer, args, with_tools=with_tools)
        drawn, loop = drawn_from(args), LoopThread()
        sampler = make_policy_sampler(policy, tokenizer, args, drawn, loop, self.accelerator, _most_at_once(args))
        settings = self._rollout_settings(drawn.params, sampler.max_context)
        self.player = Player(sampler, loop, self.renderer, pools, standalone, sources, settings)
        self.rollout_func = rollout_func
        try:
            self._prepare(pools, weights, drawn.params.temperature, router_coef)
        except BaseException:
            self.player.close()  # no engine, server or environment outlives a trainer that was not built
            raise

    # --- construction ---
    def _prepare(
        self, pools: Mapping[str | None, EnvironmentPool], weights: dict[str, float], temperature: float,
        router_coef: float,
    ) -> None:  # fmt: skip
        """What turns rollouts into steps is there, and the first prompts fit."""
        args, policy = self.args, self.model
        self.policy_forward = PolicyForward(setup.bare(policy), temperature, multiple=setup.row_multiple(args))
        self.reference = keep_reference(self)
        self.schedule = self._schedule()
        self.window = {"train": MetricWindow(), "eval": MetricWindow()}
        self.clock = StepClock(self.window["train"], self.accelerator.num_processes)
        self.add_callback(self.clock)
        self.reported = Reported(
            frozenset(self.player.engine.tool_names()),
            tuple(str(name) for name in pools) if len(pools) > 1 else (), tuple(weights), self.tasks.shares(),
        )  # fmt: skip
        self.buffer = RolloutBuffer(
            self, AdvantageSettings(str(args.scale_rewards), args.multi_objective_aggregation, weights,
                                    args.mask_truncated_completions),
        )  # fmt: skip
        self.step_runner = StepRunner(
            self.policy_forward, self.accelerator, self.loss_config, args.max_completion_length,
            EntropyControl(args.entropy_settings()), router_coef, args.sampler_correction(), args.token_budget,
        )  # fmt: skip
        self._sharing_said = False
        self._writer: EpisodeWriter | None = None
        self._last_groups: tuple[RolloutGroup, ...] = ()
        self._check_prompts()
        shorten(self)

    def _rollout_settings(self, sampling: SamplingParams, max_context: int | None) -> RolloutSettings:
        args = self.args
        return RolloutSettings(
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            max_context=max_context,
            sampling=sampling,
            deadlines=args.deadlines(),
            max_attempts=args.rollout_attempts,
            min_survivors=args.min_group_survivors,
            max_failures_in_row=args.max_failures_in_row,
            max_concurrent=_most_at_once(args),
            seed=args.seed,
        )

    def _schedule(self) -> Schedule:
        args = self.args
        assert args.generation_batch_size and args.steps_per_generation
        return Schedule(
            accumulation=args.gradient_accumulation_steps,
            slices=args.steps_per_generation,
            iterations=args.num_iterations,
            prompts=args.generation_batch_size // (args.num_generations or 1),
            rows=self.tasks.size,
            group=args.num_generations or 1,
            drop_last=args.dataloader_drop_last,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.reference is not None:
            self.reference.restore(Path(resume_from_checkpoint))

    def _refuse_sharding(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigurationError("Sharded models (FSDP, DeepSpeed) are not in this version; use DDP.")

    def _check_prompts(self, most: int = 256) -> None:
        """The first prompts of a sized dataset fit the model; later ones are checked when they are played."""
        context = self.player.engine.settings.max_context
        if self.train_dataset is None or self.tasks.size is None or context is None:
            return
        for position in range(min(self.tasks.size, most)):
            task = self.tasks.task(0, position)
            prompt = task.row.get("prompt")
            if not prompt:
                continue
            schemas = [tool.schema for tool in self.player.engine.tools_of(task).values()]
            ids = self.renderer.text_prompt(prompt) if isinstance(prompt, str) and not schemas else self.renderer.first(
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, schemas)  # fmt: skip
            if len(ids) >= context:
                raise ConfigurationError(
                    f"The prompt of row {task.index} has {len(ids)} tokens, but the model sees {context}: shorten or "
                    f"filter such rows, or {self._longer(context)}."
                )

    def _longer(self, context: int) -> str:
        """What would let the sampler see more tokens than `context`."""
        own = setup.context_length(self.model)
        if self.args.use_vllm and (own is None or own > context):
            server = self.args.vllm_mode == "server" and self.args.vllm_server_base_url != "auto"
            return "raise the server's --max-model-len" if server else "raise vllm_max_model_length"
        return "use a model with a longer context"

    # --- the loop of transformers.Trainer sees one cheap batch per micro-batch ---
    def get_train_dataloader(self) -> DataLoader:
        """Numbers of micro-batches: what they hold follows from the step, so skipping them on resume is free."""
        steps = self.schedule.steps_per_epoch if self.args.max_steps <= 0 or self.tasks.size else self.args.max_steps
        assert steps is not None
        return DataLoader(range(steps * self.args.gradient_accumulation_steps), batch_size=1, collate_fn=list)  # type: ignore[arg-type]

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Trains the whole optimizer step at its last micro-batch; the earlier ones wait for it."""
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        started = time.perf_counter()
        if callable(enter_training := getattr(self.optimizer, "train", None)):
            enter_training()  # schedule-free optimizers
        self.policy_forward.probe()
        batch = self.buffer.batch(self.state.global_step)
        if not self._sharing_said:
            self._say_sharing(batch)
        model.train()
        entropy, saved = self.step_runner.entropy, self.state.stateful_callbacks
        assert isinstance(saved, dict)  # in every checkpoint, beside the states of callbacks
        entropy.load(saved)
        begun, self.step_runner.forward.seconds = time.perf_counter(), 0.0
        loss = self._step_loss = self.step_runner.run(model, batch, self.window["train"])
        self.clock.trained(self.step_runner.tokens, time.perf_counter() - begun, self.step_runner.forward.seconds)
        entropy.save(saved)
        self.window["train"].add("step_time", time.perf_counter() - started)
        return loss

    def _say_sharing(self, batch: StepBatch) -> None:
        self._sharing_said = True
        if self.accelerator.is_main_process:
            budget = row_budget(batch.items, batch.batch_size, self.args.token_budget)
            least = self.policy_forward.least_for(batch.items)
            why_not = self.policy_forward.why_not_shared
            if self.policy_forward.least_shared is not None:
                why_not = "rows with images, or longer than the model's own limit, are not packed"
            if text := sharing_text(sharing_of(batch.items, budget, least), least, why_not):
                say(self, text)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        check_step(self, norm, self._step_loss)
        return norm

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def played(self, groups: tuple[RolloutGroup, ...], mode: str = "train") -> None:
        """Groups of this rank are on record."""
        self._last_groups = groups
        if self.args.record_episodes and mode == "train":
            if self._writer is None:
                rank = self.accelerator.process_index
                name = "episodes.jsonl" if rank == 0 else f"episodes.rank{rank}.jsonl"
                Path(str(self.args.output_dir)).mkdir(parents=True, exist_ok=True)
                begin_record(Path(str(self.args.output_dir)) / name, self.state.global_step)
                self._writer = EpisodeWriter(Path(str(self.args.output_dir)) / name)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            self._writer.write_all(rollouts, step=self.state.global_step)

    # --- evaluation, logging, saving ---
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Plays every row `num_generations_eval` times and logs the same metrics with the prefix ``eval_``."""
        return evaluate(self, eval_dataset, metric_key_prefix)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if "loss" in logs else "eval"
        if mode == "train":
            logs = logs | self.collect("train") | {"num_tokens": float(self.state.num_input_tokens_seen)}
            if self.args.log_completions and self.accelerator.is_main_process:
                log_completions(self._last_groups, self.args, self.state.global_step)
        super().log(logs, start_time)

    def collect(self, mode: str) -> dict[str, float]:
        """The metrics of all ranks since the last call; the window starts again."""
        from accelerate.utils import gather_object

        window = self.window[mode]
        states = [window.state()]
        parts = window.parts
        if self.accelerator.num_processes > 1:
            states, parts = gather_object(states), gather_object(parts)
        values = MetricWindow.values(states)
        cispo = self.loss_config.loss_type == "cispo"
        plain = "clip_ratio" if self.loss_config.loss_type not in ("sapo", "vespo") else None
        values |= clip_summary(
            parts, clip_metric="cispo_clip_ratio" if cispo else plain, level=self.loss_config.importance_sampling_level
        )
        window.clear()
        return values

    def saw_tokens(self, count: int) -> None:
        """`count` more prompt and completion tokens were played, over all ranks; checkpoints hold the sum."""
        self.state.num_input_tokens_seen += count

    def group_plans(self, cycle: int) -> list[GroupPlan]:
        """The groups of a generation cycle, the same on every rank."""
        size = self.args.num_generations or 1
        tasks = [self.tasks.task(epoch, position) for epoch, position in self.schedule.tasks(cycle)]
        return [GroupPlan(f"{cycle}.{i}", task, size) for i, task in enumerate(tasks)]

    def shuffle_seed(self, cycle: int) -> int:
        return derive_seed(self.args.seed, "order", cycle)

    def close(self) -> None:
        """Environments and threads are gone, and the model's own forward is back. The trainer is of no more use."""
        self.player.close()
        self.policy_forward.restore()
        if self._writer is not None:
            self._writer.close()


def _most_at_once(args: GRPOConfig) -> int:
    """Rollouts that a rank plays side by side."""
    per_rank = max(1, (args.generation_batch_size or 1) // args.world_size)
    return max(per_rank, args.num_generations or 1, args.per_device_eval_batch_size)


def _task_source(dataset: Any, args: GRPOConfig, factory: Any) -> TaskSource:
    """The rows to train on.

    Raises:
        ConfigurationError: No data and no environment, or a run without a known end.
    """
    if dataset is None and factory is None:
        raise ConfigurationError("There is nothing to play: pass train_dataset, environment_factory, or both.")
    check_weights(factory, dataset)
    if not is_sized(dataset) and args.max_steps <= 0:
        what = "Without a train_dataset" if dataset is None else "With iterable data"
        raise ConfigurationError(f"{what} the length of the run is not known: set max_steps in GRPOConfig.")
    if args.dataloader_num_workers:
        warnings.warn("dataloader_num_workers does nothing: a row is read when it is played.", stacklevel=3)
    return setup.task_source(
        dataset, factory, args, seed=args.seed, order_seed=args.data_seed, shuffle=bool(args.shuffle_dataset)
    )

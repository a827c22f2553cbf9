"""What a run will cost, before its model is loaded: episodes, groups and tokens, measured on its first prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.check.tokens import BYTE_LEVEL, byte_level_tokenizer
from agentrl.errors import ConfigurationError
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, play_and_close
from agentrl.rollout.scoring import Scorer
from agentrl.sampler import ScriptedSampler
from agentrl.tasks import TaskSource
from agentrl.tool_schema import build_tools
from agentrl.train import setup
from agentrl.train.run_build import RunParts, model_location
from agentrl.train.run_file import RunFile
from agentrl.train.run_tokenizer import local_tokenizer
from agentrl.train.schedule import Schedule
from agentrl.train.tree import tree_of

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig

MEASURED = 32  # first prompts at most


@dataclass(frozen=True, slots=True)
class RunCost:
    """A run in numbers. Token counts with `at_most` assume that every completion is as long as it may be."""

    processes: int
    optimizer_steps: int
    group_size: int
    groups_per_batch: int  # a batch is what one generation phase plays
    episodes_per_batch: int
    trained_per_step: int  # episodes in the loss of one optimizer step
    new_episodes_per_step: float  # played for it; fewer where a batch is trained on several times
    episodes: int  # of the whole run
    prompt_tokens: float  # mean of the measured first prompts
    longest_prompt: int
    tool_tokens: int  # of a first prompt, on average
    completion_at_most: int | None  # tokens of one; None: what the model's context leaves
    step_tokens_at_most: float | None
    run_tokens_at_most: float | None
    distinct_prompt_share: float  # distinct prompt tokens / all prompt tokens of a generation batch
    sharing_worth: tuple[
        float, float
    ]  # times fewer tokens to train with shared beginnings: the longest completions, none
    measured_prompts: int
    tokenizer: str


def run_cost(run: RunFile, parts: RunParts, args: GRPOConfig, processes: int = 1) -> RunCost:
    """The cost of a run on so many processes; a few of its first prompts are made for it, as episodes make them.

    Raises:
        ConfigurationError: What keeps the run from starting, as far as it shows without the model.
    """
    schedule, source = plan(parts, args, processes)
    group = args.num_generations or 1
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * (schedule.steps_per_epoch or 0))
    batches = math.ceil(steps * schedule.accumulation / schedule.per_cycle)
    new_per_step = schedule.prompts * group * schedule.accumulation / schedule.per_cycle
    tokenizer, name = tokenizer_of(run, parts, args)
    prompts, tool_tokens = first_prompts(parts, args, source, schedule, tokenizer)
    lengths = [len(ids) for ids in prompts]
    mean = sum(lengths) / len(lengths)
    longest = args.max_completion_length
    each = None if longest is None else mean + longest
    share = distinct_tokens(prompts) / (sum(lengths) * group)
    return RunCost(
        processes=processes,
        optimizer_steps=steps,
        group_size=group,
        groups_per_batch=schedule.prompts,
        episodes_per_batch=schedule.prompts * group,
        trained_per_step=args.per_device_train_batch_size * processes * schedule.accumulation,
        new_episodes_per_step=new_per_step,
        episodes=batches * schedule.prompts * group,
        prompt_tokens=mean,
        longest_prompt=max(lengths),
        tool_tokens=tool_tokens,
        completion_at_most=longest,
        step_tokens_at_most=None if each is None else new_per_step * each,
        run_tokens_at_most=None if each is None else batches * schedule.prompts * group * each,
        distinct_prompt_share=share,
        sharing_worth=(1.0 if each is None else each / (mean * share + each - mean), 1 / share),
        measured_prompts=len(prompts),
        tokenizer=name,
    )


def plan(parts: RunParts, args: GRPOConfig, processes: int) -> tuple[Schedule, TaskSource]:
    """What is played when, and the rows; checked as the trainer checks them."""
    if parts.train_rows is None and args.max_steps <= 0:
        raise ConfigurationError("Without [data] the length of the run is not known: set max_steps in [train].")
    setup.make_sources(parts.reward_functions, args.reward_weights, setup.make_pools(parts.factory))
    source = setup.task_source(
        parts.train_rows, parts.factory, args, seed=args.seed, order_seed=args.data_seed,
        shuffle=bool(args.shuffle_dataset),
    )  # fmt: skip
    assert args.generation_batch_size and args.steps_per_generation
    batch, slices = args.generation_batch_size, args.steps_per_generation
    if processes != args.world_size:
        per_step = args.per_device_train_batch_size * processes
        batch = per_step * slices
        if batch % (args.num_generations or 1):
            raise ConfigurationError(
                f"num_generations ({args.num_generations}) does not divide the {batch} episodes that {processes} "
                "processes generate at a time (per_device_train_batch_size x processes x steps_per_generation)."
            )
    schedule = Schedule(
        accumulation=args.gradient_accumulation_steps,
        slices=slices,
        iterations=args.num_iterations,
        prompts=batch // (args.num_generations or 1),
        rows=source.size,
    )
    return schedule, source


def tokenizer_of(run: RunFile, parts: RunParts, args: GRPOConfig) -> tuple[Any, str]:
    """The policy's tokenizer where it is on this machine, else one token per byte; and what to call it."""
    if run.model.tiny:
        from agentrl.train.run_tiny import tiny_tokenizer

        return tiny_tokenizer(parts, args.seed), "tiny policy's own tokenizer"
    name, kwargs = model_location(run)
    if run.model.tokenizer is not None:
        path = run.find(run.model.tokenizer)
        name, kwargs = str(path) if path.is_dir() else run.model.tokenizer, {}
    try:
        return local_tokenizer(name, **kwargs), f"tokenizer of {name}"
    except ConfigurationError:
        return byte_level_tokenizer(), f"{BYTE_LEVEL}, because the tokenizer of {name} is not on this machine"


def first_prompts(
    parts: RunParts, args: GRPOConfig, source: TaskSource, schedule: Schedule, tokenizer: Any
) -> tuple[list[list[int]], int]:
    """Ids of the first prompts of the first batch, made by resetting environments, and what tools cost in one.

    The episodes are played by a policy that answers at once.
    """
    pools, tools = setup.make_pools(parts.factory), build_tools(parts.tools)
    with_tools = bool(tools) or any(pool.tools for pool in pools.values())
    renderer = setup.make_renderer(tokenizer, args, with_tools=with_tools)
    stop = renderer.stop_ids[:1] or (0,)
    settings = RolloutSettings(max_completion_length=None, max_attempts=1, min_survivors=0, seed=args.seed)
    engine = RolloutEngine(ScriptedSampler([list(stop)]), renderer, pools, tools, settings)
    tasks = [source.task(epoch, position) for epoch, position in schedule.tasks(0)[:MEASURED]]
    plans = [GroupPlan(f"dry{i}", task, 1) for i, task in enumerate(tasks)]

    rollouts = [rollout for group in play_and_close(engine, Scorer([]), plans) for rollout in group.rollouts]
    for rollout in rollouts:
        if not rollout.turns:
            last = (rollout.error or "").strip().split("\n")[-1]
            raise ConfigurationError(f"The first episode cannot begin ({rollout.outcome.value}): {last}")
    costs = [_tool_tokens(renderer, engine, task, rollout) for task, rollout in zip(tasks, rollouts, strict=True)]
    return [rollout.turns[0].prompt_ids or [] for rollout in rollouts], round(sum(costs) / len(costs))


def _tool_tokens(renderer: Renderer, engine: RolloutEngine, task: Any, rollout: Any) -> int:
    schemas = [tool.schema for tool in engine.tools_of(task).values()]
    if not schemas or isinstance(rollout.prompt, str):
        return 0
    return len(renderer.first(rollout.prompt, schemas)) - len(renderer.first(rollout.prompt, []))


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that are left where every common beginning is counted once: the nodes of a trie.

    >>> distinct_tokens([[1, 2, 3], [1, 2, 4], [1, 2, 3], [5]])
    5
    """
    return len(tree_of(prompts, 1).ids_T)

"""`agentrl eval`: how good is a policy at an environment?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.output import print_json, print_table, print_text


def evaluate(
    name: Annotated[
        str, typer.Argument(metavar="ID|CONFIG", help="An environment (id or 'module:Class') or a run file.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]...", help="Arguments of the environment, or settings of the run file."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="random, scripted:FILE, model:FOLDER, model (that of the run file), or vllm:URL of a server.",
        ),
    ] = "random",
    episodes: Annotated[int, typer.Option("-n", "--episodes", min=1, help="Episodes in all.")] = 100,
    k: Annotated[int, typer.Option("-k", min=1, help="Of pass@k.")] = 1,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Episodes of each task; by default k.")
    ] = None,
    success: Annotated[float, typer.Option("--success", help="Reward from which an episode is a success.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of tasks and of sampling.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="Of a model; 0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of a model's completion.")] = 4096,
    max_turns: Annotated[int, typer.Option("--max-turns", min=0, help="Turns whose tool calls are run.")] = 32,
    output: Annotated[Path | None, typer.Option("--output", help="Write the episodes to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Play many episodes of a policy: mean reward with its 95% interval, pass@k, outcomes.

    Episodes that failed on the environment's side are counted, never scored as 0.
    """
    from agentrl.cli.assess import Limits, check_counts, play, summary
    from agentrl.cli.policies import make_policy

    each = samples or k
    tasks = check_counts(episodes, each, k)
    contest, model = _contest(name, arguments or [], policy == "model")
    limits = Limits(max_tokens, max_turns, temperature)
    tools = {
        tool.name: tool.schema["function"]
        for pool in contest.pools.values()
        for tool in [*pool.tools.values(), *(contest.tools or {}).values()]
    }
    chosen = make_policy(policy, seed, tools, model, limits.concurrent)
    if contest.rows is not None:
        tasks = min(tasks, len(contest.rows))
    groups = play(contest, chosen, limits, tasks=tasks, samples=each, seed=seed)
    if output is not None:
        _write(output, groups)
    numbers = {"environment": name, "policy": chosen.name, "seed": seed, **summary(groups, k=k, success=success)}
    if as_json:
        print_json(numbers)
    else:
        _print(numbers)


def _contest(name: str, arguments: list[str], needs_model: bool) -> tuple[Any, tuple[str, dict[str, Any]] | None]:
    """What is played, and the model that a run file names."""
    from agentrl.cli.assess import Contest
    from agentrl.cli.env.common import environment
    from agentrl.pool import EnvironmentPool, make_pools

    if not name.endswith((".toml", ".yaml", ".yml")):
        return Contest({None: EnvironmentPool(environment(name, arguments))}), None
    from agentrl.errors import ConfigurationError
    from agentrl.tool_schema import build_tool
    from agentrl.train.run_build import load_parts, model_location
    from agentrl.train.run_file import read_run_file

    run = read_run_file(name, arguments)
    parts = load_parts(run)
    tools = {tool.name: tool for tool in map(build_tool, parts.tools)}
    rows = parts.eval_rows if parts.eval_rows is not None else parts.train_rows
    if needs_model and run.model.tiny:
        raise ConfigurationError("A tiny policy is made while training; evaluate its folder: --policy model:FOLDER.")
    model = model_location(run) if needs_model else None
    return Contest(make_pools(parts.factory), rows, tools, parts.reward_functions, parts.reward_weights), model


def _write(path: Path, groups: Any) -> None:
    from agentrl.record import EpisodeWriter

    with EpisodeWriter(path) as writer:
        for group in groups:
            writer.write_all(group.rollouts)


def _print(numbers: dict[str, Any]) -> None:
    interval = numbers["interval_95"]
    rows: list[list[Any]] = [["policy", numbers["policy"]]]
    counts = f"{numbers['episodes']} ({numbers['tasks']} tasks, {numbers['scored']} scored, {numbers['failed']} failed)"
    rows.append(["episodes", counts])
    reward = "nobody scored" if numbers["reward"] is None else f"{numbers['reward']:.3f}"
    if interval is not None:
        reward += f"  95% interval {interval[0]:.3f} to {interval[1]:.3f} ({numbers['interval']})"
    elif numbers["reward"] is not None:
        reward += "  no interval: one task, or no spread between tasks"
    rows.append(["mean reward", reward])
    if len(numbers["sources"]) > 1:
        rows += [
            [f"  {source}", None if value is None else f"{value:.3f}"] for source, value in numbers["sources"].items()
        ]
    passed = numbers["pass_at_k"]
    what = f"reward >= {numbers['success']:g}, {numbers['pass_at_k_tasks']} tasks"
    rows.append([f"pass@{numbers['k']}", "-" if passed is None else f"{passed:.3f}  ({what})"])
    rows.append(["outcomes", ", ".join(f"{outcome} {count}" for outcome, count in numbers["outcomes"].items())])
    rows.append(
        ["turns, calls", f"{numbers['turns']:.2f}, {numbers['tool_calls']:.2f} ({numbers['tool_errors']:.2f} errors)"]
    )
    print_table(["", ""], rows)
    if numbers["first_failure"]:
        print_text(f"First failure: {numbers['first_failure']}")

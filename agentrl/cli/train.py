"""`agentrl train`: a run from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.output import print_json, print_note, print_text
from agentrl.cli.toml_text import toml_text
from agentrl.errors import ConfigurationError

DERIVED = ("generation_batch_size", "steps_per_generation", "bf16")  # follow from the file and the machine


def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A run file: .toml, .yaml or .yml.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that win over the file: train.max_steps=10."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the settings and what the run will cost; load no model.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, or from the one named after it.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="With --dry-run: the processes that it will run on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model as a run file says.

    Ctrl-C once finishes the step and saves; twice stops at once.
    """
    overrides, checkpoint = _sort_words(words or [], resume)
    from agentrl.train.run_file import read_run_file

    run = read_run_file(config, overrides)
    if processes is not None and not dry_run:
        raise ConfigurationError(
            "--processes goes with --dry-run; to start several: accelerate launch -m agentrl.cli.main train CONFIG."
        )
    if dry_run:
        _dry_run(run, processes, as_json)
        return
    from agentrl.train.run_start import start  # imports torch: only once the file is known to be well formed

    say = print_note if as_json else print_text
    result = start(run, resume=checkpoint, say=say, warn=print_note)
    if result.pop("speaks"):
        _print_result(result, " ".join([str(config), *overrides]), as_json)
    if result["interrupted"]:
        raise typer.Exit(130)


def _print_result(result: dict[str, Any], words: str, as_json: bool) -> None:
    if as_json:
        print_json(result)
    if result["interrupted"]:
        print_note(
            f"Stopped after step {result['steps']}; saved as {result['checkpoint']}. "
            f"Go on with: agentrl train {words} --resume"
        )
    elif not as_json:
        folder = result["output_dir"]
        print_text(f"Trained {result['steps']} steps in {result['seconds']:.0f} s; the model is in {folder}.")
        episodes = Path(folder) / "episodes.jsonl"
        if episodes.exists():
            print_text(f"Read episodes: agentrl show {episodes}")


def _sort_words(words: list[str], resume: bool) -> tuple[list[str], bool | str]:
    """Overrides have an equals sign; a word without one is the checkpoint that follows --resume."""
    overrides = [word for word in words if "=" in word]
    others = [word for word in words if "=" not in word]
    if others and (not resume or len(others) > 1):
        raise ConfigurationError(f"'{others[-1]}' is no setting: write section.key=value, such as train.max_steps=10.")
    return overrides, others[0] if others else resume


# --- dry run ---------------------------------------------------------------------------
def _dry_run(run: Any, processes: int | None, as_json: bool) -> None:
    import transformers

    from agentrl.train.run_build import grpo_config, load_parts
    from agentrl.train.run_cost import run_cost

    transformers.utils.logging.set_verbosity_error()
    parts = load_parts(run)
    args = grpo_config(run)
    cost = run_cost(run, parts, args, processes or args.world_size)
    if as_json:
        print_json({"config": {**run.table, "train": args.to_dict()}, "cost": cost})
        return
    settings = {"output_dir": args.output_dir, "seed": args.seed, **run.table.get("train", {})}
    print_text(toml_text({**run.table, "train": settings}))
    derived = {name: getattr(args, name) for name in DERIVED if name not in settings}
    print_text(f"# on this machine: {', '.join(toml_text(derived).splitlines())}")
    print_text("")
    print_text(cost_text(cost))


def cost_text(cost: Any) -> str:
    """The numbers in sentences."""
    new, trained = cost.new_episodes_per_step, cost.trained_per_step
    where = f" on {cost.processes} processes" if cost.processes > 1 else ""
    lines = [
        f"A generation batch: {cost.episodes_per_batch} episodes, {cost.groups_per_batch} groups of {cost.group_size}"
        f"{where}.",
        f"An optimizer step: {trained} episodes trained, {new:g} played for it"
        + (f", at most {_count(cost.step_tokens_at_most)} tokens." if cost.step_tokens_at_most is not None else "."),
        f"The run: {cost.optimizer_steps} optimizer steps, {cost.episodes} episodes"
        + (f", at most {_count(cost.run_tokens_at_most)} tokens." if cost.run_tokens_at_most is not None else "."),
        f"A first prompt: {cost.prompt_tokens:.0f} tokens on average, {cost.longest_prompt} at most, "
        f"{cost.tool_tokens} of them for tools (measured on {cost.measured_prompts} prompts).",
        "A completion: "
        + (
            f"at most {cost.completion_at_most} tokens."
            if cost.completion_at_most
            else "what the model's context leaves."
        ),
        f"Sharing: {100 * cost.distinct_prompt_share:.1f}% of a batch's prompt tokens are distinct, which is worth "
        f"{cost.sharing_worth[0]:.1f}x in training with the longest completions, at most {cost.sharing_worth[1]:.1f}x.",
        f"Counted with the {cost.tokenizer}.",
    ]
    return "\n".join(lines)


def _count(number: float) -> str:
    """A count as a person reads it: 950, 12.3 thousand, 4.56 million."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e4, "thousand")):
        if number >= size:
            return f"{number / (1e3 if word == 'thousand' else size):.3g} {word}"
    return f"{number:.0f}"

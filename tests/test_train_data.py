"""Which prompts a run plays, in which order, with which seeds; and that resuming goes on at the exact next one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import train_kit as kit
from train_kit import Door, length, make

from agentrl.errors import ConfigurationError
from agentrl.train.evaluate import prepare_eval_data
from agentrl.train.generation import share_of
from agentrl.train.trainer import GRPOTrainer

ROWS = [{"prompt": f"p{i}"} for i in range(5)]
SAVE = {"save_strategy": "steps", "save_steps": 1}


class Phases(list[tuple[int, list[str]]]):
    """A `rollout_func` that notes (step, prompts) of every generation phase."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        self.append((trainer.state.global_step, list(prompts)))
        n = len(prompts) * 4
        ids = [[21 + i, kit.stop()] for i in range(n)]
        scores = [float(i % 4) for i in range(n)]
        return {"prompt_ids": [[20]] * n, "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * n, "score": scores}


def trainer(data: Any, folder: Path, phases: Phases, **args: Any) -> GRPOTrainer:
    return GRPOTrainer(
        kit.policy(), kit.score, kit.config(folder, **args), train_dataset=data, rollout_func=phases,
        processing_class=kit.tokenizer(),
    )  # fmt: skip


def phases_of(data: Any, folder: Path, resume: int | None = None, **args: Any) -> Phases:
    """The phases of a run, or of one that resumes at a checkpoint of an earlier run in the same folder."""
    phases = Phases()
    made = trainer(data, folder, phases, **args)
    made.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    made.close()
    return phases


def prompts(phases: Sequence[tuple[int, list[str]]]) -> list[str]:
    return [prompt for _, names in phases for prompt in names]


# --- epochs ----------------------------------------------------------------------------
def test_F123_F131_an_epoch_plays_every_row_and_the_next_has_an_order_of_its_own(tmp_path: Path):
    """5 rows, 2 a phase: 3 phases an epoch, the last filled up from the epoch's beginning; 3 epochs are 9 steps."""
    args = {"max_steps": -1, "num_train_epochs": 3, "shuffle_dataset": True}
    phases = phases_of(ROWS, tmp_path, **args)
    epochs = [prompts(phases[3 * n : 3 * n + 3]) for n in range(3)]
    assert [step for step, _ in phases] == list(range(9))
    for order in epochs:
        assert sorted(order[:5]) == [f"p{i}" for i in range(5)] and order[5] == order[0]
    assert len({tuple(order) for order in epochs}) == 3
    assert phases == phases_of(ROWS, tmp_path, **args)


def test_dataloader_drop_last_leaves_the_last_rows_of_an_epoch_out_of_it(tmp_path: Path):
    args = {"dataloader_drop_last": True, "max_steps": -1}
    assert prompts(phases_of(ROWS, tmp_path, num_train_epochs=2, **args)) == ["p0", "p1", "p2", "p3"] * 2
    assert prompts(phases_of(ROWS[:1], tmp_path, num_train_epochs=1, **args)) == ["p0", "p0"]  # never nothing


def test_options_of_a_dataloader_that_have_nothing_to_do(tmp_path: Path):
    with pytest.warns(UserWarning, match="dataloader_num_workers does nothing"):
        trainer(ROWS, tmp_path, Phases(), dataloader_num_workers=2)
    with pytest.raises(ConfigurationError, match=r"train_sampling_strategy='sequential' .* shuffle_dataset"):
        kit.config(tmp_path, train_sampling_strategy="sequential")


def test_iterations_lengthen_the_run_and_not_the_data(tmp_path: Path):
    phases = phases_of(ROWS, tmp_path, max_steps=-1, num_train_epochs=1, num_iterations=2)
    assert [step for step, _ in phases] == [0, 2, 4] and prompts(phases) == ["p0", "p1", "p2", "p3", "p4", "p0"]


def test_F133_unshuffled_rows_keep_their_order_over_phases_and_epochs(tmp_path: Path):
    assert prompts(phases_of(ROWS[:4], tmp_path, max_steps=4)) == ["p0", "p1", "p2", "p3"] * 2


def test_phases_that_do_not_fill_an_epochs_last_step_are_followed_by_the_next_epochs(tmp_path: Path):
    """2 phases of 3 micro-batches an epoch, 4 micro-batches a step: 2 steps an epoch hold 2 phases and 2/3 of one."""
    args = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 3}
    phases = phases_of(ROWS, tmp_path, max_steps=-1, num_train_epochs=1, **args)
    assert phases == [(0, ["p0", "p1", "p2"]), (0, ["p3", "p4", "p0"]), (1, ["p0", "p1", "p2"])]


def test_max_steps_ends_in_the_middle_of_an_epoch_or_goes_on_after_the_last(tmp_path: Path):
    assert prompts(phases_of(ROWS, tmp_path, max_steps=2, num_train_epochs=9)) == ["p0", "p1", "p2", "p3"]
    assert len(phases_of(ROWS, tmp_path, max_steps=7, num_train_epochs=1)) == 7


def test_a_dataset_smaller_than_a_generation_batch_is_played_again_with_new_seeds(tmp_path: Path):
    made = make(tmp_path, ["fine"], train_dataset=[{"prompt": "only"}], environment_factory=Door, args={"max_steps": 2})
    Door.log = []
    made.train()
    seeds = [kwargs["seed"] for kwargs in Door.log]
    assert len(seeds) == 16 and len(set(seeds)) == 4  # two groups in each of two phases


# --- resuming --------------------------------------------------------------------------
class Stream:
    """Iterable anew; shuffles itself by epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"prompt": f"p{(2 * i + self.epoch) % 5}"} for i in range(5)])


def hub_stream() -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter(ROWS))


DATA: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "datasets": lambda: datasets.Dataset.from_list(ROWS),
    "generator": hub_stream,
    "shuffled stream": lambda: hub_stream().shuffle(seed=3, buffer_size=4),
    "own stream": Stream,
}


@pytest.mark.parametrize("name", DATA)
def test_F115_a_resumed_run_goes_on_at_the_exact_next_prompt(tmp_path: Path, name: str):
    """Over the borders of epochs, however the data come, and whether or not transformers would skip data."""
    args = {"max_steps": 6, "shuffle_dataset": name != "own stream"}
    whole = phases_of(DATA[name](), tmp_path, **args, **SAVE)
    assert [step for step, _ in whole] == list(range(6)) and set(prompts(whole[:3])) == {f"p{i}" for i in range(5)}
    for step, skip in ((3, True), (4, False)):
        resumed = phases_of(DATA[name](), tmp_path, step, ignore_data_skip=skip, **args)
        assert resumed == whole[step:], step


@pytest.mark.parametrize(
    ("phase", "steps"),
    [
        ({"num_iterations": 2}, 2),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, 2),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}, 4),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "generation_batch_size": 8}, 2),
    ],
)
def test_F159_resuming_within_a_phase_plays_that_phase_again_and_then_the_next(
    tmp_path: Path, phase: dict[str, int], steps: int
):
    args = {"max_steps": 2 * steps + 1, "shuffle_dataset": True, **phase}
    whole = phases_of(ROWS, tmp_path, **args, **SAVE)
    assert [step for step, _ in whole] == [0, steps, 2 * steps]
    for step in (1, 2 * steps - 1):
        resumed = phases_of(ROWS, tmp_path, step, **args)
        assert prompts(resumed) == prompts(whole[step // steps :]), step
        assert resumed[0][0] == step


@pytest.mark.parametrize("data", [lambda: ROWS, hub_stream, Stream])
def test_F117_two_calls_of_train_begin_at_the_same_prompt(tmp_path: Path, data: Callable[[], Any]):
    """Also where the first one resumed: its place does not leak into the second."""
    whole = phases_of(data(), tmp_path, max_steps=4, **SAVE)
    phases = Phases()
    made = trainer(data(), tmp_path, phases, max_steps=4)
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    made.train()
    assert phases == [*whole[2:], *whole]


def test_an_iterator_that_can_be_read_once_lasts_as_long_as_its_rows(tmp_path: Path):
    """What was read is remembered for a second call of train; a run that needs more rows ends with an error."""
    phases = Phases()
    made = trainer(iter(ROWS), tmp_path, phases, max_steps=2)
    made.train()
    made.train()
    assert phases[2:] == phases[:2]
    with pytest.raises(ConfigurationError, match="ended after 5 rows"):
        trainer(iter(ROWS), tmp_path, Phases(), max_steps=3).train()


# --- seeds of the sampler --------------------------------------------------------------
def drawn(folder: Path, resume: int | None = None, **args: Any) -> list[tuple[int, ...]]:
    """The seed of every turn that was sampled, in the order of phases."""
    args = {"max_steps": 6, "shuffle_dataset": True} | args
    made = make(folder, [[30]], train_dataset=ROWS[:2], reward_funcs=length, args=args)
    made.train(resume_from_checkpoint=None if resume is None else str(folder / f"checkpoint-{resume}"))
    seeds = [request.seed for request in made.player.engine.sampler.requests]
    made.close()
    return seeds


def test_F125_F161_sampler_seeds_differ_and_a_resumed_run_has_those_of_its_steps(tmp_path: Path):
    """Two prompts, so that each step is an epoch: no member, prompt or epoch draws from a stream that another has."""
    whole = drawn(tmp_path, **SAVE)
    assert len(whole) == len(set(whole)) == 6 * 8
    assert drawn(tmp_path, 4) == whole[4 * 8 :]
    assert not set(drawn(tmp_path, seed=7)) & set(whole)
    assert set(drawn(tmp_path, data_seed=7)) == set(whole)  # the order is another, the streams are the same


# --- columns and kinds of data ---------------------------------------------------------
def columns_seen(folder: Path, data: Any, **args: Any) -> set[str]:
    seen: set[str] = set()

    def judge(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(set(kwargs) & {"answer", "environment"})
        return [0.0] * len(completions)

    make(folder, ["ok"], train_dataset=data, reward_funcs=judge, args={"max_steps": 1, **args}).train()
    return seen


def test_remove_unused_columns_of_every_kind_of_data(tmp_path: Path):
    """Also of a stream that does not know its columns."""
    rows = [{"prompt": "hello", "answer": "x", "environment": "e"}] * 2
    unnamed = datasets.IterableDataset.from_generator(lambda: iter(rows))
    assert unnamed.column_names is None
    for data in (rows, datasets.Dataset.from_list(rows), unnamed, iter(rows)):
        assert columns_seen(tmp_path, data, remove_unused_columns=True) == {"environment"}
    assert columns_seen(tmp_path, rows) == {"answer", "environment"}


class Counted:
    """Has a length and can be iterated, but no row can be asked for by its number."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


def test_data_with_a_length_but_no_index_are_a_stream(tmp_path: Path):
    assert prompts(phases_of(Counted(), tmp_path, max_steps=3)) == ["p0", "p1", "p2", "p3", "p4", "p0"]
    with pytest.raises(ConfigurationError, match="set max_steps"):
        trainer(Counted(), tmp_path, Phases(), max_steps=-1)


# --- evaluation sets -------------------------------------------------------------------
def evaluated(folder: Path, data: Any, **args: Any) -> tuple[Any, Phases]:
    phases = Phases()
    made = GRPOTrainer(
        kit.policy(), kit.score, kit.config(folder, **args), train_dataset=ROWS, eval_dataset=data,
        rollout_func=phases, processing_class=kit.tokenizer(),
    )  # fmt: skip
    return made, phases


@pytest.mark.parametrize(
    "data", [lambda: ROWS, hub_stream, Stream, Counted, lambda: iter(ROWS), lambda: (row for row in ROWS)]
)
def test_every_kind_of_evaluation_set_can_be_evaluated_twice(tmp_path: Path, data: Callable[[], Any]):
    made, phases = evaluated(tmp_path, data())
    for _ in range(2):
        metrics = made.evaluate()
        assert metrics["eval_reward"] == 1.5 and metrics["eval_completions/mean_length"] == 2
    assert [sorted(names) for _, names in phases] == [[f"p{i}" for i in range(5)]] * 2
    assert made.state.log_history[-1]["eval_reward"] == 1.5


def test_sets_by_name(tmp_path: Path):
    sets = {"easy": ROWS[:2], "hard": hub_stream()}
    for data in (sets, datasets.DatasetDict({"easy": datasets.Dataset.from_list(ROWS[:2])}) | {"hard": hub_stream()}):
        made, phases = evaluated(tmp_path, data)
        metrics = made.evaluate()
        assert metrics["eval_easy_reward"] == metrics["eval_hard_reward"] == 1.5
        assert [len(names) for _, names in phases] == [2, 5] and "eval_reward" not in metrics
        assert set(made.evaluate("easy")) == {name for name in metrics if name.startswith("eval_easy_")}
        assert set(made.evaluate(ROWS[:1], metric_key_prefix="test")) == {
            name.replace("eval_easy_", "test_") for name in metrics if name.startswith("eval_easy_")
        }
        with pytest.raises(
            ConfigurationError, match=r"no evaluation set 'harder'; eval_dataset has: \['easy', 'hard'\]"
        ):
            made.evaluate("harder")


def test_bad_evaluation_data_are_found_at_construction(tmp_path: Path):
    for data, says in (([], "empty"), ({"a": ROWS, "b": [{"q": 1}]}, "no 'prompt' column"), (iter([]), "empty")):
        with pytest.raises(ConfigurationError, match=says):
            prepare_eval_data(data, None, kit.config(tmp_path))


def test_sets_and_steps_have_seeds_of_their_own_and_the_same_start_states(tmp_path: Path):
    """Row 0 of one set and row 0 of another are no copies; the same set begins the same way each time."""
    made = make(tmp_path, [[30]], environment_factory=Door, train_dataset=ROWS[:2], eval_dataset={"a": ROWS, "b": ROWS},
                args={"num_generations_eval": 1, "max_steps": 1})  # fmt: skip
    Door.log = []
    made.evaluate()
    first = sorted(kwargs["seed"] for kwargs in Door.log)
    assert len(first) == len(set(first)) == 10
    sampled = len(made.player.engine.sampler.requests)
    made.train()
    Door.log = []
    made.evaluate()
    assert sorted(kwargs["seed"] for kwargs in Door.log) == first
    streams = [request.seed for request in made.player.engine.sampler.requests]
    assert sampled == 10 and len(streams) == len(set(streams)) == 10 + 8 + 10


def test_num_generations_eval_is_the_number_of_rollouts_per_row(tmp_path: Path):
    for given, episodes in ((None, 4), (1, 1), (3, 3)):
        made = make(tmp_path, [[30]], train_dataset=ROWS[:2], eval_dataset=ROWS, reward_funcs=length,
                    args={"num_generations_eval": given})  # fmt: skip
        metrics = made.evaluate()
        assert len(made.player.engine.sampler.requests) == 5 * episodes
        assert (metrics["eval_frac_reward_zero_std"], metrics["eval_completions/mean_length"]) == (1.0, 1.0)


def test_evaluating_between_steps_changes_nothing_of_the_training(tmp_path: Path):
    """Real sampling: the same rollouts, losses and weights with an evaluation after every step and without."""
    runs = []
    for changes in ({}, {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}):
        args = {"max_steps": 3, "max_completion_length": 5, "optim": "adamw_torch", "learning_rate": 1e-3}
        made = make(tmp_path, train_dataset=ROWS, reward_funcs=kit_reward, eval_dataset={"x": ROWS[:1]},
                    args=args | {"num_iterations": 2} | changes)  # fmt: skip
        made.train()
        made.close()
        logs = [kit.lasting(entry) for entry in made.state.log_history if "loss" in entry]
        runs.append((kit.weights(made.model), logs, kit.logs_with(made, "eval_x_reward")))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert len(runs[0][2]) == 0 and len(runs[1][2]) == 4


def kit_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


# --- ranks -----------------------------------------------------------------------------
@pytest.mark.parametrize(("groups", "world"), [(9, 4), (3, 4), (4, 4), (1, 2)])
def test_F137_the_ranks_shares_are_all_groups_once_and_none_exceeds_another_by_more_than_one(groups: int, world: int):
    """A rank without a group still takes part in every exchange: test_train_distributed."""
    shares = [share_of(range(groups), rank, world) for rank in range(world)]
    assert sorted(itertools.chain(*shares)) == list(range(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1

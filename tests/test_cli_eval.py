"""`agentrl eval`: policies, and the numbers that it reports."""

from __future__ import annotations

import itertools
import json
import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli.main import main
from agentrl.cli.numbers import mean_interval, pass_at_k, t_quantile

WORLD = '''
from agentrl import Environment, EnvironmentFailed

class Coin(Environment):
    """Half of the tasks are won by calling once."""
    run_inline = True
    def reset(self, seed): self.seed, self.flips = seed, 0; return "Flip it."
    def flip(self) -> str:
        """Flip."""
        self.flips += 1
        return "flipped"
    def get_reward(self): return float(self.flips == 1 and self.seed % 2)

class Fragile(Coin):
    """A third of the tasks break."""
    def get_reward(self):
        if self.seed % 3 == 0:
            raise EnvironmentFailed("the connection is gone", stage="reward")
        return 1.0
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coin_world.py").write_text(WORLD)
    (tmp_path / "flip.txt").write_text("flip\n\nsay done\n")
    (tmp_path / "flip.json").write_text('[{"tool_calls": [{"name": "flip", "arguments": {}}]}, "done"]')
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("coin_world", None)


def run(capsys, *words: str):
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- what is played --------------------------------------------------------------------
@pytest.mark.parametrize("script", ["flip.txt", "flip.json"])
def test_a_script_is_played_in_every_episode(capsys, script):
    shown = run(capsys, "coin_world:Coin", "--policy", f"scripted:{script}", "-n", "40")
    assert shown["episodes"] == shown["tasks"] == shown["scored"] == 40 and shown["failed"] == 0
    assert shown["turns"] == 2.0 and shown["tool_calls"] == 1.0 and shown["outcomes"] == {"finished": 40}
    low, high = shown["interval_95"]
    assert 0.2 < low < shown["reward"] < high < 0.8 and shown["pass_at_k"] == shown["reward"]
    assert run(capsys, "coin_world:Coin", "--policy", f"scripted:{script}", "-n", "40") == shown  # the same seed


def test_samples_of_a_task_share_its_start(capsys):
    """Every task is won always or never, so that samples of a task bring nothing: pass@3 is the mean reward."""
    words = ("coin_world:Coin", "--policy", "scripted:flip.txt", "-n", "60", "-k", "3")
    shown = run(capsys, *words)
    assert (shown["tasks"], shown["k"], shown["pass_at_k_tasks"]) == (20, 3, 20)
    assert shown["pass_at_k"] == pytest.approx(shown["reward"])
    alone = run(capsys, "coin_world:Coin", "--policy", "scripted:flip.txt", "-n", "20")
    assert shown["interval_95"] == pytest.approx(alone["interval_95"])  # not narrower by sqrt(3)


def test_failures_are_counted_and_score_nothing(capsys, folder):
    shown = run(capsys, "coin_world:Fragile", "--policy", "scripted:flip.txt", "-n", "24", "--output", "e.jsonl")
    assert shown["failed"] > 0 and shown["failed"] + shown["scored"] == 24
    assert shown["reward"] == 1.0 and shown["pass_at_k"] == 1.0 and shown["pass_at_k_tasks"] == shown["scored"]
    assert shown["outcomes"]["reward_failed"] == shown["failed"]
    assert "the connection is gone" in shown["first_failure"]
    records = [json.loads(line) for line in (folder / "e.jsonl").read_text().splitlines()]
    assert len(records) == 24 and [r["reward"] for r in records].count(None) == shown["failed"]


def test_random_and_success_threshold(capsys):
    shown = run(capsys, "agentrl/Hunt-v0", "hops=1", "-n", "60", "--success", "0.5")
    assert 0 < shown["pass_at_k"] < 1 and shown["policy"] == "random"
    assert main(["eval", "agentrl/Hunt-v0", "-n", "8"]) == 0
    text = capsys.readouterr().out
    assert "mean reward" in text and "pass@1" in text and "outcomes" in text


def test_a_run_file_brings_rows_rewards_and_tools(capsys, folder):
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    (folder / "answers.py").write_text(
        "def is_done(completions, **k):\n    return [float('done' in str(c)) for c in completions]\n"
    )
    (folder / "run.toml").write_text(
        'version=1\n[model]\nname = "nowhere"\n[data]\npath="rows.jsonl"\n[rewards]\nfunctions = ["answers:is_done"]\n'
    )
    (folder / "say.txt").write_text("done\n")
    shown = run(capsys, "run.toml", "--policy", "scripted:say.txt", "-n", "3")
    assert shown["reward"] == 1.0 and shown["sources"] == {"is_done": 1.0} and shown["interval_95"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["coin_world:Coin", "--policy", "greedy"], "There is no policy 'greedy'"),
        (["coin_world:Coin", "--policy", "scripted:no.txt"], "There is no script 'no.txt'"),
        (["coin_world:Coin", "--policy", "scripted:bad.json"], "'bad.json' is not JSON"),
        (["coin_world:Coin", "--policy", "scripted:bad.txt"], "'bad.txt', line 2: "),
        (["coin_world:Coin", "--policy", "model"], "Name the model"),
        (["coin_world:Coin", "-n", "7", "-k", "2"], "use -n 8"),
        (["coin_world:Coin", "-n", "8", "-k", "4", "--samples", "2"], "pass@4 needs at least 4 samples"),
        (["coin_world:Cion"], "Did you mean 'Coin'?"),
        (["no.toml"], "There is no file 'no.toml'"),
        (["coin_world:Coin", "-n", "0"], "-n"),
    ],
)
def test_mistakes_are_one_line(capsys, folder, words, said):
    (folder / "bad.json").write_text("[")
    (folder / "bad.txt").write_text("flip\n{oops\n")
    assert main(["eval", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("Error: ")


# --- numbers ---------------------------------------------------------------------------
@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(successes, data):
    k = data.draw(st.integers(1, len(successes)))
    subsets = list(itertools.combinations(successes, k))
    assert pass_at_k(len(successes), sum(successes), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_t_quantiles_of_the_tables():
    table = {1: 12.7062, 2: 4.3027, 5: 2.5706, 10: 2.2281, 29: 2.0452, 30: 2.0423, 120: 1.9799, 5000: 1.9604}
    for freedom, value in table.items():
        assert t_quantile(0.975, freedom) == pytest.approx(value, abs=6e-4)
    assert t_quantile(0.995, 4) == pytest.approx(4.6041, abs=1e-3)


def test_the_interval_covers_the_truth_19_times_of_20():
    """Tasks with a common chance each, three samples of each: counting samples as independent would cover less."""
    rng, covered, runs = random.Random(0), 0, 400
    for _ in range(runs):
        chances = [rng.random() for _ in range(30)]
        sample = [[float(rng.random() < chance) for _ in range(3)] for chance in chances]
        _, interval = mean_interval(sample)
        assert interval is not None
        covered += interval[0] <= 0.5 <= interval[1]
    assert 0.92 < covered / runs < 0.98


def test_intervals_that_cannot_be_given():
    assert mean_interval([]) == (None, None)
    assert mean_interval([[1.0, 0.0]]) == (0.5, None)
    assert mean_interval([[], [1.0], [1.0]]) == (1.0, None)
    mean, interval = mean_interval([[0.0], [1.0]])
    assert mean == 0.5 and interval is not None and interval[1] - 0.5 == pytest.approx(12.7062 * 0.5, abs=1e-2)
    assert math.isfinite(interval[0])

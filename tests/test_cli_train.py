"""`agentrl train`: dry runs of the examples, a short run, Ctrl-C, resuming, and what stops a run before it starts."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.train.run_cost import distinct_tokens

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted([*ROOT.glob("examples/*.toml"), *ROOT.glob("examples/*.yaml")])

CONFIG = """
version = 1
[model]
name = "policy"
[environment]
id = "agentrl/Hunt-v0"
[train]
output_dir = "out"
max_steps = 3
num_generations = 4
per_device_train_batch_size = 8
max_completion_length = 24
gradient_checkpointing = false
logging_steps = 1
save_strategy = "no"
"""
FUNCTIONS = '''
import os
import signal

told = []

def constant(completions, **kwargs):
    return [0.5] * len(completions)

def ctrl_c_once(completions, **kwargs):
    if not told:
        told.append(1)
        os.kill(os.getpid(), signal.SIGINT)
    return [float(len(str(c))) for c in completions]

def ctrl_c_twice(completions, **kwargs):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    return [0.0] * len(completions)

def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: Which one.
    """
    return "nothing"
'''


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with an untrained model of a few thousand weights and its tokenizer."""
    from agentrl.train.tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    make_model(tokenizer, 0, hidden=16, layers=1, context=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, policy):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy").symlink_to(policy)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "run_functions.py").write_text(FUNCTIONS)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("run_functions", None)


def dry(capsys, *words: str):
    code = main(["train", *words, "--dry-run", "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


# --- dry runs --------------------------------------------------------------------------
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cost = dry(capsys, str(example))["cost"]
    assert cost["episodes"] > 100 and cost["prompt_tokens"] > 0 and 0 < cost["distinct_prompt_share"] < 1
    assert not list(tmp_path.iterdir())  # a dry run writes nothing
    elsewhere = "tiny" not in example.read_text()  # a model of a hub, or one that must be converted first
    assert ("is not on this machine" in cost["tokenizer"]) == elsewhere
    assert main(["train", str(example), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"Counted with the {cost['tokenizer']}." in text and "An optimizer step:" in text


def test_the_cost_by_hand(folder, capsys):
    """8 episodes a batch, in 2 groups of 4. A batch feeds 4 micro-batches and a step takes 2: 8 x 2 / 4 are new."""
    shown = dry(capsys, "run.toml", "train.steps_per_generation=1", "train.gradient_accumulation_steps=2",
                "train.num_iterations=4", "train.max_steps=5")  # fmt: skip
    cost = shown["cost"]
    assert (cost["episodes_per_batch"], cost["groups_per_batch"], cost["group_size"]) == (8, 2, 4)
    assert (cost["trained_per_step"], cost["new_episodes_per_step"]) == (16, 4.0)
    assert cost["episodes"] == 24  # 10 micro-batches, 4 for each batch: 3 batches of 8
    assert cost["run_tokens_at_most"] == pytest.approx(24 * (cost["prompt_tokens"] + 24))
    assert cost["step_tokens_at_most"] == pytest.approx(4 * (cost["prompt_tokens"] + 24))
    assert cost["measured_prompts"] == 2 and cost["tool_tokens"] < cost["prompt_tokens"] <= cost["longest_prompt"]
    assert cost["tokenizer"] == "tokenizer of policy"
    assert shown["config"]["train"]["num_iterations"] == 4 and shown["config"]["train"]["generation_batch_size"] == 8


def test_more_processes_play_more_groups(folder, capsys):
    one, four = dry(capsys, "run.toml")["cost"], dry(capsys, "run.toml", "--processes", "4")["cost"]
    assert (one["groups_per_batch"], four["groups_per_batch"]) == (2, 8)
    assert four["trained_per_step"] == 4 * one["trained_per_step"]
    assert main(["train", "run.toml", "--processes", "2"]) == 2


def test_rows_set_the_length_of_the_run(folder, capsys):
    (folder / "rows.jsonl").write_text("".join(f'{{"question": "{i}?", "answer": {i}}}\n' for i in range(6)))
    (folder / "rows.toml").write_text(
        'version = 1\n[model]\nname = "policy"\n[data]\npath = "rows.jsonl"\ncolumns = {question = "prompt"}\n'
        '[rewards]\nfunctions = ["run_functions:constant"]\n[tools]\nfunctions = ["run_functions:lookup"]\n'
        "[train]\nnum_generations = 4\nper_device_train_batch_size = 8\nnum_train_epochs = 2\n"
    )
    cost = dry(capsys, "rows.toml")["cost"]
    assert cost["optimizer_steps"] == 6  # 3 batches of 2 rows, twice
    assert cost["tool_tokens"] > 50
    assert main(["train", "rows.toml", "data.columns={qestion='prompt'}", "--dry-run"]) == 2
    assert "Did you mean 'question'?" in capsys.readouterr().err


def test_what_is_printed_is_a_run_file(folder, capsys):
    assert main(["train", "run.toml", "--dry-run"]) == 0
    text = capsys.readouterr().out.partition("\n\nA generation batch")[0]
    (folder / "again.toml").write_text(text)
    assert dry(capsys, "again.toml")["cost"] == dry(capsys, "run.toml")["cost"]


def test_distinct_tokens_by_hand():
    assert distinct_tokens([]) == 0
    assert distinct_tokens([[1, 2], [1, 2]]) == 2
    assert distinct_tokens([[1, 2, 3], [1, 2], [4]]) == 4


# --- runs ------------------------------------------------------------------------------
def test_a_run_trains_saves_and_can_be_evaluated(folder, capsys):
    assert main(["train", "run.toml", "train.save_strategy=steps", "train.save_steps=2"]) == 0
    out = capsys.readouterr().out
    assert "step 3/3  reward" in out and "Trained 3 steps" in out
    assert (folder / "out/model.safetensors").is_file() and (folder / "out/episodes.jsonl").is_file()
    assert main(["eval", "run.toml", "--policy", "model:out", "-n", "4", "--max-tokens", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scored"] == 4
    assert main(["train", "run.toml", "train.max_steps=4", "--resume", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4 and len(result["rewards"]) == 1  # step 4, after checkpoint-3
    assert main(["train", "run.toml", "train.max_steps=3", "--resume", "out/checkpoint-2"]) == 0


def test_ctrl_c_once_finishes_the_step_and_saves(folder, capsys):
    words = ["train", "run.toml", "rewards.functions=['run_functions:ctrl_c_once']"]
    before = signal.getsignal(signal.SIGINT)
    assert main(words) == 130
    captured = capsys.readouterr()
    assert "this step is finished and saved" in captured.err
    assert "Stopped after step 1; saved as out/checkpoint-1. Go on with: agentrl train run.toml" in captured.err
    assert captured.err.rstrip().endswith("--resume") and "Traceback" not in captured.err
    assert signal.getsignal(signal.SIGINT) is before
    assert main([*words, "--resume"]) == 0
    assert "Trained 3 steps" in capsys.readouterr().out


def test_ctrl_c_twice_stops_at_once(folder, capsys):
    assert main(["train", "run.toml", "rewards.functions=['run_functions:ctrl_c_twice']"]) == 130
    assert capsys.readouterr().err.rstrip().endswith("Interrupted.")
    assert not list((folder / "out").glob("checkpoint-*"))


# --- refused before anything is loaded ---------------------------------------------------
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.learning_rat=1e-5"], "Unknown key 'train.learning_rat'. Did you mean 'learning_rate'?"),
        (["train.dtype='bfloat16'"], "It belongs in [model]"),
        (["train.learning_rate=fast"], "'train.learning_rate' must be a number; it is text: 'fast'."),
        (["train.max_steps=1.5"], "'train.max_steps' must be a whole number; it is a number: 1.5."),
        (["train.num_generations=3"], "num_generations (3) must divide"),
        (["train.use_liger_kernel=true"], "use_liger_kernel=True is not available"),
        (["train.lr_scheduler_type=bogus"], "bogus"),
        (["train.max_steps=-1"], "set max_steps"),
        (["environment.id=agentrl/Hnt-v0"], "Did you mean 'agentrl/Hunt-v0'?"),
        (["environment.kwargs.hop=2"], "Did you mean 'hops'?"),
        (["rewards.functions=['no_such']"], "There is no reward function 'no_such'"),
        (["rewards.functions=['run_functions:constant']", "rewards.weights=[1, 2]"], "2 values for 1 reward functions"),
        (["tools.functions=['run_functions:lookpu']"], "Did you mean 'lookup'?"),
        (["--resume"], "There is no checkpoint in 'out'"),
        (["--resume", "nowhere"], "'nowhere' is no checkpoint"),
        (["nowhere"], "'nowhere' is no setting"),
        (["train.output_dir=run.toml/out"], "Nothing can be written to the output folder 'run.toml/out'"),
        (["model.name=policy", "model.gguf_file=a.gguf"], "holds no file 'a.gguf'"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, words, said):
    assert main(["train", "run.toml", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err, captured.err
    assert captured.err.startswith("Error: ") and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    assert not (folder / "out/model.safetensors").exists()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder that nobody can write in")
def test_a_read_only_output_folder_is_refused_before_the_model_is_loaded(folder, capsys):
    assert main(["train", "run.toml", "model.name=/no/such/model", "train.output_dir=/proc/out"]) == 2
    assert "Nothing can be written to the output folder '/proc/out'" in capsys.readouterr().err


def test_a_model_that_is_nowhere(folder, capsys):
    (folder / "empty").mkdir()
    assert main(["train", "run.toml", "model.name=empty"]) == 2
    assert "The model 'empty' cannot be loaded" in capsys.readouterr().err

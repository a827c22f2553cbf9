"""Run files: what they may say, and how what they may not say is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.errors import ConfigurationError
from agentrl.train.run_file import EnvironmentSection, PeftSection, read_run_file
from agentrl.train.run_objects import load_rows, read_value, reward_function

ROOT = Path(__file__).parent.parent
GOOD = """
version = 1
[model]
tiny = true
[environment]
id = "agentrl/Hunt-v0"
kwargs = { hops = 2 }
[train]
max_steps = 3
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.toml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# --- reading ---------------------------------------------------------------------------
def test_toml_and_yaml_say_the_same(write):
    toml = read_run_file(write(GOOD))
    yaml = read_run_file(
        write(
            "version: 1\nmodel: {tiny: true}\nenvironment:\n  id: agentrl/Hunt-v0\n  kwargs: {hops: 2}\n"
            "train: {max_steps: 3}\n",
            "run.yaml",
        )
    )
    assert toml.environments == yaml.environments == {None: EnvironmentSection("agentrl/Hunt-v0", {"hops": 2})}
    assert toml.table == yaml.table and toml.model == yaml.model


def test_yaml_numbers_and_words_are_what_they_look_like(write):
    """YAML 1.1 reads 1e-6 as text and no as false."""
    run = read_run_file(
        write(
            "version: 1\nmodel: {tiny: true}\nenvironment: agentrl/Hunt-v0\n"
            "train: {learning_rate: 1e-6, save_strategy: no, seed: 3, fp16: false, output_dir: on}\n",
            "run.yml",
        )
    )
    assert run.train == {"learning_rate": 1e-6, "save_strategy": "no", "seed": 3, "fp16": False, "output_dir": "on"}


def test_overrides_win_and_make_sections(write):
    run = read_run_file(
        write(GOOD),
        ["train.max_steps=7", "train.learning_rate=1e-5", "model.peft.r=4", "environment.kwargs.hops=1",
         "train.scale_rewards=none", "train.output_dir=a=b"],
    )  # fmt: skip
    assert run.train == {"max_steps": 7, "learning_rate": 1e-5, "scale_rewards": "none", "output_dir": "a=b"}
    assert run.model.peft == PeftSection(r=4)
    assert run.environments[None].kwargs == {"hops": 1}


def test_several_environments(write):
    run = read_run_file(
        write(
            'version = 1\n[model]\ntiny = true\n[environment]\ncourier = "agentrl/Courier-v0"\n'
            '[environment.hunt]\nid = "agentrl/Hunt-v0"\nshare = 2\n'
        )
    )
    assert run.environments == {
        "courier": EnvironmentSection("agentrl/Courier-v0"),
        "hunt": EnvironmentSection("agentrl/Hunt-v0", share=2),
    }


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("2024-01-01x", "2024-01-01x"), ("a\nb", "a\nb"), ("", "")])
def test_values_of_overrides(text, value):
    assert read_value(text) == value


# --- mistakes --------------------------------------------------------------------------
def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 1\n[model\n", "is not TOML: Expected ']' at the end of a table declaration (at line 2"),
        (changed("version = 1", ""), "Say which version of run files this is: version = 1"),
        (changed("version = 1", "version = 2"), "written for version 2 of run files; this agentrl reads version 1"),
        (changed("version = 1", "version = true"), "version True"),
        (changed("tiny = true", "tini = true"), "Unknown key 'model.tini'. Did you mean 'tiny'?"),
        (changed("[train]", "[trian]"), "Unknown key 'trian'. Did you mean 'train'?"),
        (
            changed("tiny = true", "tiny = true\nkwargs = {}"),
            "Unknown key 'model.kwargs'. It belongs in [environment].",
        ),
        (changed("tiny = true", "tiny = 1"), "'model.tiny' must be true or false; it is a whole number: 1."),
        (changed("tiny = true", 'name = ["a"]'), "'model.name' must be text or none; it is a list: ['a']."),
        (changed("tiny = true", ""), "[model] needs either a name or tiny = true"),
        (changed("tiny = true", 'tiny = true\nname = "a"'), "[model] needs either a name or tiny = true"),
        (changed("tiny = true", "tiny = true\nwarm_up = { steps = 5 }"), "warm_up does nothing with tiny = true"),
        (changed("tiny = true", 'tiny = true\npeft = "lora"'), "'model.peft' must be a table; it is text."),
        (changed("tiny = true", "tiny = true\npeft = {rank = 8}"), "Unknown key 'model.peft.rank'."),
        (changed('id = "agentrl/Hunt-v0"', ""), "'environment' lacks the key 'id'."),
        (changed("kwargs = { hops = 2 }", "kwargs = 2"), "'environment.kwargs' must be a table"),
        ('version = 1\nmodel = "x"\n[environment]\nid = "a/B-v0"', "'model' must be a table; it is text."),
        ("version = 1\n[model]\ntiny = true\n", "There is nothing to play"),
        ("version = 1\n[model]\ntiny = true\n[data]\npath = 'x'\n", "give an [environment]"),
        ("version = 1\n[environment]\nid = 'a/B-v0'\n", "There is no [model]"),
    ],
)
def test_mistakes_in_a_file(write, text, said):
    path = write(text)
    with pytest.raises(ConfigurationError) as error:
        read_run_file(path)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 1\nmodel: {tiny: [}\n", "is not YAML: expected the node content, but found '}' (line 2)"),
        ("a: 1\na: 2\n", "the key 'a' stands twice (line 2)"),
        ("1: 2\n", "the key 1 is not text (line 1)"),
        ("- a\n", "must be a table of sections; it is list"),
        ("a: !!python/object:os.system {}\n", "is not YAML"),
        ("a: \x07", "is not YAML"),
    ],
)
def test_mistakes_in_yaml(write, text, said):
    with pytest.raises(ConfigurationError) as error:
        read_run_file(write(text, "run.yaml"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_none(tmp_path, write):
    for path, said in ((tmp_path / "no.toml", "There is no file"), (write("x", "run.ini"), "must end in .toml")):
        with pytest.raises(ConfigurationError, match=said):
            read_run_file(path)
    (tmp_path / "bytes.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_run_file(tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("train", "must look like section.key=value"),
        ("train..x=1", "must look like section.key=value"),
        ("version.a=1", "goes into 'version', which is not a table"),
        ("model.tniy=true", "Did you mean 'tiny'?"),
    ],
)
def test_mistakes_in_overrides(write, word, said):
    with pytest.raises(ConfigurationError, match=said.replace("?", "[?]")):
        read_run_file(write(GOOD), [word])


# --- objects ---------------------------------------------------------------------------
def test_reward_functions_by_name():
    assert reward_function("think_format_reward").__name__ == "think_format_reward"
    made = reward_function("get_soft_overlong_punishment", {"max_completion_len": 10, "soft_punish_cache": 2})
    assert made(completion_ids=[[0] * 10]) == [-1.0]
    for spec, kwargs, said in (
        ("think_format", None, "Did you mean 'think_format_reward'?"),
        ("get_soft_overlong_punishment", None, "needs kwargs: max_completion_len, soft_punish_cache"),
        ("get_soft_overlong_punishment", {"max_len": 1}, "takes no argument 'max_len'"),
        ("think_format_reward", {"a": 1}, "takes no kwargs"),
        ("agentrl.rewards:think_formt_reward", None, "Did you mean 'think_format_reward'?"),
    ):
        with pytest.raises(ConfigurationError) as error:
            reward_function(spec, kwargs)
        assert said in str(error.value)


def test_rows_of_every_format(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1", "answer": 2}\n{"question": "2+2", "answer": 4}\n')
    (tmp_path / "a.csv").write_text("question,answer\n1+1,2\n2+2,4\n")
    rows = load_rows(tmp_path / "a.jsonl", columns={"question": "prompt"})
    assert list(rows) == [{"prompt": "1+1", "answer": 2}, {"prompt": "2+2", "answer": 4}]
    rows.to_parquet(tmp_path / "a.parquet")
    for name, columns in (("a.csv", {"question": "prompt"}), ("a.parquet", {})):
        assert list(load_rows(tmp_path / name, columns=columns, limit=1)) == [{"prompt": "1+1", "answer": 2}]
    rows.save_to_disk(tmp_path / "folder")
    assert len(load_rows(tmp_path / "folder")) == 2


def test_mistakes_in_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1+1"}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "a.txt").write_text("x")
    for name, columns, said in (
        ("a.jsonl", {"qestion": "prompt"}, "has no column 'qestion'. Did you mean 'question'?"),
        ("no.jsonl", {}, "There is no data file"),
        ("a.txt", {}, "no known format"),
        ("bad.jsonl", {}, "cannot be read"),
    ):
        with pytest.raises(ConfigurationError) as error:
            load_rows(tmp_path / name, columns=columns)
        assert said in str(error.value)


def test_reading_a_run_file_needs_no_torch(write):
    import subprocess

    code = (
        "import sys; sys.modules['torch'] = None\nfrom agentrl.train.run_file import read_run_file\n"
        "from agentrl.train.run_build import load_parts\nload_parts(read_run_file(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(write(GOOD))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""`agentrl template check`: verdict, forks, the token view, and what it says of templates that cannot be used."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import tiny_tokenizers as tiny

from agentrl.check.sample import LOOK, Piece, play_sample, sample_turns, sample_value
from agentrl.cli.main import main
from agentrl.cli.template import examine
from agentrl.cli.template_view import Token, _cut, _visible
from agentrl.render import Renderer

BAD = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
COUNTS = "{{ '<|im_start|>system\n' ~ messages | length ~ ' messages<|im_end|>\n' }}"


@pytest.fixture(scope="module")
def qwen3() -> str:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None, "the dev extra brings trl"
    return (pathlib.Path(found.origin).parent / "chat_templates/qwen3.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, qwen3: str) -> str:
    """A folder that holds a tokenizer with Qwen3's own template, and nothing else."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    tiny.qwen(qwen3).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main(["template", "check", *words])
    got = capsys.readouterr()
    return code, got.out, got.err


def run_json(capsys: Any, *words: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *words, "--json")
    return code, json.loads(out)


# --- what is said ----------------------------------------------------------------------
def test_the_training_template_is_chosen_and_nothing_forks(model: str, capsys: Any) -> None:
    code, out, _ = run(capsys, model)
    lines = out.rstrip("\n").split("\n")
    assert code == 0
    assert lines[0].startswith("template     qwen3: the tokenizer's own template was replaced: ")
    assert lines[1:5] == [
        "calls        hermes",
        "reasoning    <think>",
        "stop tokens  <|im_end|>",
        "forks        0 of 2 turns after tool results; 0 of 1 turn after a user's message",
    ]
    assert lines[-1] == f"{model} can be trained: every turn continues the tokens held so far."


def test_the_plain_view_by_hand(model: str, capsys: Any) -> None:
    _, out, _ = run(capsys, model)
    assert "\x1b" not in out
    at = out.index("turn 2, added")
    view = out[at : out.index("turn 3, added")].split("\n")
    assert view[0].startswith("turn 2, added: held, not trained, ") and view[0].endswith(" tokens")
    assert view[1:10] == [
        "    ⏎",
        "    «<|im_start|>»user⏎",
        "    «<tool_response>»⏎",
        "    A note says: cave.⏎",
        "    «</tool_response>»⏎",
        "    «<tool_response>»⏎",
        "    A note says: cave.⏎",
        "    «</tool_response>»«<|im_end|>»⏎",
        "    «<|im_start|>»assistant⏎",
    ]
    assert view[11].startswith("turn 2, sampled, trained, ")
    answer = ["    «<think>»⏎", "    That is it.⏎", "    «</think>»⏎", "    ⏎", "    It is in the cave.«<|im_end|>»"]
    assert view[12:17] == answer


def test_the_original_template_forks_when_a_user_speaks_again(model: str, capsys: Any) -> None:
    code, found = run_json(capsys, model, "--chat-template", "original")
    assert code == 0 and found["usable"] and not found["preserving"] and found["template"] == "original"
    assert found["forks"] == {"after_tools": {"forks": 0, "turns": 2}, "after_user": {"forks": 1, "turns": 1}}
    assert " only when a user speaks again, each at the cost of one more sequence: the chat " in found["verdict"]
    (drift,) = found["drifts"]
    assert drift["turn"] == 3 and "Where could it be?" not in drift["drift"]["new_text"]
    kinds = [(p["turn"], p["kind"]) for p in found["episode"]]
    assert kinds[-3:] == [(2, "trained"), (3, "prompt"), (3, "trained")]


def test_a_template_that_rewrites_every_turn(model: str, capsys: Any, own_folder: pathlib.Path, qwen3: str) -> None:
    (own_folder / "counts.jinja").write_text(COUNTS + qwen3)
    code, out, _ = run(capsys, model, "--chat-template", "counts.jinja")
    assert code == 0
    assert "forks        2 of 2 turns after tool results; 1 of 1 turn after a user's message" in out
    assert "turn 1, a new sequence: the whole prompt again, " in out
    assert f"\n{model} can be trained, but turns fork after tool results, " in out


def test_json_has_all_ids_and_they_are_the_episode(model: str, capsys: Any, qwen3: str) -> None:
    code, found = run_json(capsys, model)
    tokenizer = tiny.qwen(qwen3)
    episode = play_sample(Renderer(tokenizer), tokenizer, [LOOK])
    assert code == 0
    assert [p["ids"] for p in found["episode"]] == [p.ids for p in episode.pieces()]
    last = episode.turns[-1]
    assert [i for p in found["episode"] for i in p["ids"]] == [*(last.prompt_ids or []), *(last.output_ids or [])]
    assert [found[key] for key in ("calls", "thinking", "stop_tokens")] == ["hermes", "<think>", ["<|im_end|>"]]
    trained = "".join(p["text"] for p in found["episode"] if p["kind"] == "trained")
    assert trained.count("<|im_end|>") == 4 and "A note says" not in trained and "Find the treasure" not in trained
    assert trained.count('"name": "search"') == 3


def test_variables_reach_the_template(model: str, capsys: Any) -> None:
    code, found = run_json(capsys, model, "enable_thinking=false")
    assert code == 0
    assert found["generation"] == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    trained = [p["text"] for p in found["episode"] if p["kind"] == "trained"]
    assert len(trained) == 4 and not any("<think>" in text for text in trained)


# --- tools -----------------------------------------------------------------------------
TOOLS = '''
class Shop:
    def reset(self): ...
    def buy(self, item: str, count: int = 1) -> str:
        """Buy something.

        Args:
            item: What to buy.
            count: How many.
        """
        return "bought"

def sell(item: str) -> str:
    """Sell something.

    Args:
        item: What to sell.
    """
    return "sold"
'''


def names_in(found: Any) -> set[str]:
    text = "".join(p["text"] for p in found["episode"] if p["kind"] == "trained")
    return {name for name in ("buy", "sell", "search", "act") if f'"name": "{name}"' in text}


def test_tools_of_a_module_are_shown_and_called(model: str, capsys: Any, own_folder: pathlib.Path) -> None:
    (own_folder / "shop_tools.py").write_text(TOOLS)
    code, found = run_json(capsys, model, "--tools", "shop_tools:Shop", "--tools", "shop_tools:sell")
    assert code == 0 and names_in(found) == {"buy", "sell"}
    assert '"arguments": {"item": "cave", "count": 1}' in found["episode"][1]["text"]
    code, found = run_json(capsys, model, "--env", "shop_tools:Shop")
    assert code == 0 and names_in(found) == {"buy"}
    assert names_in(run_json(capsys, model, "--env", "agentrl/Hunt-v0")[1]) == {"search"}


def test_an_environment_without_tools_is_checked_without_calls(model: str, capsys: Any, own_folder: Any) -> None:
    (own_folder / "talk_only.py").write_text("class Talk:\n    def reset(self): return 'hi'\n")
    code, found = run_json(capsys, model, "--env", "talk_only:Talk")
    assert code == 0 and found["forks"]["after_tools"] == {"forks": 0, "turns": 0}
    assert [p["turn"] for p in found["episode"] if p["kind"] == "trained"] == [0, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tools", "a:b", "--env", "agentrl/Hunt-v0"), "exclude each other"),
        (("--tools", "shop"), "must look like 'module:function'"),
        (("--env", "agentrl/Hunted-v0"), "No environment is registered as"),
        (("--chat-template", "none.jinja"), "The template 'none.jinja' cannot be read"),
        (("--tokenizer", "x"), "has a tokenizer of its own"),
        (("thinking",), "must look like name=value"),
        (("messages=1",), "agentrl sets them itself"),
    ],
)
def test_what_the_user_can_fix_is_told(model: str, capsys: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = run(capsys, model, *words)
    assert (code, said in err or said in out) in ((2, True), (1, True)) and "Traceback" not in err
    assert code == (1 if "messages=1" in words else 2)


# --- templates that cannot be used -----------------------------------------------------
def test_a_template_without_tools_is_refused_with_what_to_pass(model: str, capsys: Any, own_folder: Any) -> None:
    (own_folder / "bad.jinja").write_text(BAD)
    code, out, _ = run(capsys, model, "--chat-template", "bad.jinja")
    assert code == 1 and out.count("\n") == 1
    assert (
        out.startswith(f"{model} cannot be used like this: The given chat_template ") and "Pass a chat_template" in out
    )
    code, found = run_json(capsys, model, "--chat-template", "bad.jinja")
    assert code == 1 and found == {"model": model, "usable": False, "verdict": out.rstrip("\n")}


@pytest.mark.parametrize("text", ["{% for %}", "{{ raise_exception('no') }}"])
def test_a_template_that_raises_is_refused(model: str, capsys: Any, own_folder: Any, text: str) -> None:
    (own_folder / "bad.jinja").write_text(text)
    code, out, err = run(capsys, model, "--chat-template", "bad.jinja")
    assert code == 1 and "cannot be used like this: " in out and "Pass " in out and "Traceback" not in err


def test_a_jinja_file_is_checked_with_another_tokenizer(model: str, capsys: Any, own_folder: Any, qwen3: str) -> None:
    (own_folder / "mine.jinja").write_text(qwen3)
    code, out, _ = run(capsys, "mine.jinja", "--tokenizer", model)
    assert code == 0 and out.startswith("template     qwen3: ") and "mine.jinja can be trained" in out
    code, _, err = run(capsys, "mine.jinja")
    assert code == 2 and "--tokenizer MODEL" in err


def test_a_model_that_is_nowhere_is_told(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(capsys, "./nowhere")
    assert code == 2 and err.startswith("Error: No tokenizer './nowhere' in the ") and "Traceback" not in err


def test_a_template_without_system_messages_is_fine(qwen3: str) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    report = examine("m", tiny.qwen(refuses + qwen3), [LOOK], "original", {})
    assert (
        report.usable
        and ("note", "The template takes no system message; put such text into the user's.") in report.facts()
    )


def test_a_template_of_one_call_per_turn_is_fine_and_says_so(qwen3: str) -> None:
    one = "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('1') }}{% endfor %}"
    report = examine("m", tiny.qwen(one + qwen3), [LOOK], "original", {})
    assert report.usable and ("note", "The template does not write two calls in one turn.") in report.facts()
    assert report.episode is not None and [len(t.message.get("tool_calls", ())) for t in report.episode.turns] == [
        1,
        1,
        0,
        0,
    ]


# --- colours and plain text ------------------------------------------------------------
def drawn(report: Any, **kwargs: Any) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=4000)
    console.print(report.rich(**kwargs), soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_trained_tokens_are_green_and_control_tokens_inverted(qwen3: str) -> None:
    report = examine("m", tiny.qwen(qwen3), [LOOK], None, {})
    shown = drawn(report)
    green_control, yellow_control, dim_control = "\x1b[7;32m", "\x1b[7;33m", "\x1b[2;7m"
    assert shown.count(f"{green_control}<|im_end|>") == 4  # the end of each sampled turn
    assert f"{yellow_control}<|im_start|>" in shown and f"{dim_control}<|im_start|>" in shown
    assert f"{green_control}<|im_start|>" not in shown


def test_both_views_show_the_same_tokens(qwen3: str) -> None:
    import re

    report = examine("m", tiny.qwen(qwen3), [LOOK], None, {})
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", drawn(report, full=True))
    plain = report.text(full=True).replace("«", "").replace("»", "")
    strip = [line.strip() for line in plain.split("\n") if line.strip()]
    assert [line.strip() for line in coloured.split("\n") if line.strip()] == strip


def test_no_colour_in_a_pipe_and_no_weights_are_needed(model: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from agentrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "template", "check", model],
        capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and done.stdout.isascii() and "can be trained" in done.stdout


def test_tokens_of_one_character_are_shown_with_the_last_of_them(qwen3: str) -> None:
    tokenizer = tiny.qwen(qwen3)
    report = examine("m", tokenizer, [LOOK], None, {})
    ids = tokenizer.encode("a漢<|im_end|>b" + " c" * 100, add_special_tokens=False)
    tokens = report.tokens(Piece("trained", 0, ids))
    assert len(tokens) == len(ids) and "".join(t.text for t in tokens) == tokenizer.decode(ids)
    assert [t.text for t in tokens[:5]] == ["a", "", "", "漢", "<|im_end|>"]
    assert [t.control for t in tokens[:6]] == [False, False, False, False, True, False]


def test_long_stretches_lose_their_middle_unless_full() -> None:
    tokens = [Token("abcdefg", False)] * 200
    cut = _cut(tokens, False)
    assert [t.text for t in cut[49:52]] == ["abcdefg", " ... (100 more tokens) ... ", "abcdefg"] and len(cut) == 101
    assert _cut(tokens, True) == tokens and _cut(tokens[:100], False) == tokens[:100]


def test_nothing_can_act_on_the_terminal() -> None:
    assert _visible("a\x1b[2J\r\u202e é漢\n") == "a\\x1b[2J\\r\\u202e é漢⏎\n"


def test_sample_values_fit_their_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "number", "minimum": 3}, {"type": "null"}]}, "b": {"type": ["boolean", "null"]},
            "c": {"type": "array", "items": {"enum": ["x", "y"]}}, "d": {}, "e": {"type": "object"},
        },
    }  # fmt: skip
    assert sample_value(schema) == {"a": 3.0, "b": True, "c": ["x"], "d": "cave", "e": {}}
    assert [len(turn.get("tool_calls", ())) for turn in sample_turns([LOOK])] == [1, 2, 0, 0]
    assert [len(turn.get("tool_calls", ())) for turn in sample_turns([])] == [0, 0]

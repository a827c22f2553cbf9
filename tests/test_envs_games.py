"""What holds for every game; the calculator, the hidden number and the hidden word. The boards: test_envs_boards.py."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import re
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from agentrl_envs._arithmetic import ExpressionError, evaluate, show_number
from agentrl_envs._common import quoted, settle
from agentrl_envs.calculator import Calculator
from agentrl_envs.calculator.problems import make_problem
from agentrl_envs.connect4 import Connect4
from agentrl_envs.game_2048 import Game2048
from agentrl_envs.guess_number import GuessNumber, par
from agentrl_envs.retrieval import Retrieval
from agentrl_envs.sudoku import Sudoku
from agentrl_envs.tictactoe import TicTacToe
from agentrl_envs.wordle import WORDS, Wordle, score
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import play_episode
from agentrl.check import check_environment
from agentrl.environment import Instance
from agentrl.testing import gold_episode

GAMES = [Calculator, GuessNumber, Wordle, Sudoku, Game2048, TicTacToe, Connect4]
SHOWS_ITS_SEED = [Calculator, Sudoku, Game2048, TicTacToe, Connect4]  # in the first observation
each = pytest.mark.parametrize("game", GAMES, ids=lambda game: game.__name__)


def step(env, turn):
    (made,) = turn["tool_calls"]
    return getattr(env, made["name"])(**made["arguments"])


def gold(env, seed, **row):
    """(first observation, answers, reward) of an episode of the gold policy."""
    answers = []
    first = env.reset(seed=seed, **row)
    while not env.done:
        answers.append(step(env, env._gold()))
        assert len(answers) < 600
    assert env._gold() == "Done."
    return first, answers, env.get_reward()


def answer(env, name, arguments, **row):
    """What a model reads, and what kind of error it is, after this call."""

    async def run():
        instance = Instance(env)
        await instance.reset({"seed": 3, **row})
        return await instance.call(instance.tools[name], arguments)

    return asyncio.run(run())


# --- what holds for each of them -------------------------------------------------------
@each
def test_its_check_is_clean(game):
    assert [str(f) for f in check_environment(game) if f.level != "note"] == []


@each
def test_gold_gets_the_top_reward_on_every_seed(game):
    env = game()
    rewards = {gold(env, seed)[2] for seed in range(30)}
    assert rewards == {game.reward_range[1]} == {1.0}
    assert gold_episode(game, seed=77).reward == 1.0  # through the engine


@each
def test_random_play_is_between_nothing_and_gold(game):
    env = game()
    env.reset(seed=0)
    nothing = env.get_reward()
    drawn = [play_episode(game, seed=seed, max_tool_calling_iterations=16).reward for seed in range(60)]
    assert nothing == 0.0 == game.reward_range[0]
    assert all(0.0 <= reward <= 1.0 for reward in drawn)
    assert 0.005 < sum(drawn) / len(drawn) < 0.5


@each
def test_seeds_determine_everything_and_vary(game):
    episodes = [gold(game(), seed) for seed in range(12)]
    assert episodes == [gold(game(), seed) for seed in range(12)]
    assert len({str(first) + str(answers) for first, answers, _ in episodes}) >= 9
    if game in SHOWS_ITS_SEED:
        assert len({first for first, _, _ in episodes}) >= 2


@each
def test_nothing_is_left_over_and_a_copy_goes_on(game):
    env = game()
    clean = gold(env, 5)
    env.reset(seed=6)
    step(env, env._gold())
    copy = pickle.loads(pickle.dumps(env))
    while not env.done:
        assert step(env, env._gold()) == step(copy, copy._gold())
    assert copy.done
    assert gold(copy, 5) == clean


@each
def test_calls_after_the_end_change_nothing(game):
    env = game()
    env.reset(seed=2)
    moves = []
    while not env.done:
        moves.append(env._gold())
        step(env, moves[-1])
    before = pickle.dumps((env.get_reward(), env.done))
    assert step(env, moves[-1]).endswith("is over.")
    assert pickle.dumps((env.get_reward(), env.done)) == before


@each
def test_a_row_without_values_takes_the_defaults_and_other_columns_are_ignored(game):
    names = [name for name in game()._defaults]
    assert game().reset(seed=1, **dict.fromkeys(names), other=4) == game().reset(seed=1)


HOSTILE = ["", " ", "0", "é漢😀", "x" * 5000, "<|im_end|>", "\x00", "٣", "1e9", "None", "' OR 1=1", "\n\n", 10**30, -1,
           0, 2**63, 1.5, float("nan"), True, None, [], {}, [1], {"a": 1}]  # fmt: skip


@each
def test_hostile_arguments_are_answered_in_text(game):
    tools = Instance(game()).tools
    for name, tool in tools.items():
        keys = list(tool.schema["function"]["parameters"]["properties"])
        for value in HOSTILE:
            result = answer(game(), name, dict.fromkeys(keys, value))
            assert result.error in (None, "bad_arguments"), (name, value, result)
            assert isinstance(result.content, str) and 0 < len(result.content) < 900
            assert keys == [] or not isinstance(value, (list, dict)) or result.error == "bad_arguments"


BAD = [
    (Calculator, {"depth": 0}, "depth must be a whole number from 1 to 12, not 0."),
    (Calculator, {"largest": 10.5}, "largest must be a whole number from 10 to 10000, not 10.5."),
    (Calculator, {"distractors": True}, "distractors must be a whole number from 0 to 4, not True."),
    (GuessNumber, {"hints": "none"}, "hints must be one of direction, warmth, not 'none'."),
    (GuessNumber, {"highest": 1}, "highest must be a whole number from 2 to 1000000, not 1."),
    (Wordle, {"length": 7}, "length must be a whole number from 4 to 6, not 7."),
    (Wordle, {"guesses": 1}, "guesses must be one of any, known, not 1."),
    (Sudoku, {"size": 5}, "size must be 4, 6 or 9, not 5."),
    (Sudoku, {"empties": 11}, "empties must be a whole number from 0 to 10, not 11."),
    (Game2048, {"target": 48}, "target must be a power of two from 8 to 2048, not 48."),
    (Game2048, {"size": float("nan")}, "size must be a whole number from 3 to 5, not nan."),
    (TicTacToe, {"mistakes": 1.5}, "mistakes must be a number from 0 to 1, not 1.5."),
    (TicTacToe, {"begins": "me"}, "begins must be one of seed, you, opponent, not 'me'."),
    (Connect4, {"depth": "2"}, "depth must be a whole number from 0 to 3, not '2'."),
    (Connect4, {"columns": 9}, "columns must be a whole number from 4 to 8, not 9."),
]


@pytest.mark.parametrize(("game", "knobs", "message"), BAD)
def test_bad_difficulty_names_its_range_in_the_constructor_and_in_a_row(game, knobs, message):
    for wrong in (lambda: game(**knobs), lambda: game().reset(seed=0, **knobs)):
        with pytest.raises(ValueError, match=re.escape(message)):
            wrong()


def test_a_row_goes_over_the_constructor_and_whole_floats_are_whole():
    assert settle({"a": (1, 9)}, {"a": 3}, a=4.0) == {"a": 4}
    assert GuessNumber(highest=50).reset(seed=1, highest=20) == GuessNumber(highest=20).reset(seed=1)
    assert quoted("a\nb") == "'a b'"


# --- arithmetic ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "shown"),
    [("2+3*4", "14"), ("(2+3)*4", "20"), ("-2**2", "-4"), ("2**-1", "0.5"), ("2**3**2", "512"), ("7//2", "3"),
     ("-7//2", "-4"), ("-7%3", "2"), ("1/3*3", "1"), ("0.1+0.2", "0.3"), ("10÷4×2−1", "4"), ("2^5", "32"),
     (" .5 * 4. ", "2"), ("1/3", "0.333333333333"), ("--3", "3"), ("2*-3", "-6"), ("10**20", "100000000000000000000")],
)  # fmt: skip
def test_arithmetic_by_hand(text, shown):
    assert show_number(evaluate(text).value) == shown


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "is empty"), ("   ", "is empty"), ("2 +", "ends too early, after '2 +'"), ("2 3", "At position 3 stands '3'"),
     ("2(3)", "At position 2 stands '('"), ("(2", "ends too early"), ("2)", "stands ')'"), ("1,234", "not 1,234"),
     ("x+1", "'x' at position 1"), ("__import__('os')", "'_' at position 1"), ("1/0", "Division by zero"),
     ("5%(2-2)", "Division by zero"), ("0**-1", "Division by zero"), ("2**0.5", "whole number"),
     ("9**9**9", "whole number"), ("9**256**1*9**256*9**256", "600 digits"), ("99**256*99**256", "600 digits"),
     ("999**256", "600 digits"), ("(" * 60 + "1", "nested"), ("-" * 60 + "1", "nested"), ("1+" * 200, "400 characters"),
     ("٣+1", "'٣' at position 1"), ("1e5", "'e' at position 2")],
)  # fmt: skip
def test_what_is_no_arithmetic_is_explained(text, part):
    with pytest.raises(ExpressionError, match=re.escape(part)):
        evaluate(text)


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)


@given(expressions)
@settings(max_examples=200, deadline=None)
def test_arithmetic_agrees_with_python(text):
    source = re.sub(r"\d+", lambda match: f"Fraction({match[0]})", text)
    try:
        expected = eval(source, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="Division by zero"):
            evaluate(text)
        return
    assert evaluate(text).value == expected


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_a_number_or_an_explanation(text):
    try:
        evaluate(text)
    except ExpressionError as error:
        assert str(error)


# --- calculator ------------------------------------------------------------------------
RULES = [
    (r"Then (\d+) more \w+ come in", lambda v, n: v + n),
    (r"Then (\d+) \w+ are sold", lambda v, n: v - n),
    (r"grows to (\d+) times", lambda v, n: v * n),
    (r"Then (\d+) boxes with (\d+) ", lambda v, n, m: v + n * m),
    (r"equally among (\d+) places", lambda v, n: Fraction(v, n)),
    (r"Then (\d+) percent of", lambda v, n: v - Fraction(v * n, 100)),
]


def read_story(text):
    """The stocks that a reader of the story gets; a second implementation, from the words."""
    sentences = text.split(". ")
    stock = int(re.search(r"\d+", sentences[0])[0])
    stocks = []
    for sentence in sentences[1:]:
        for pattern, rule in RULES:
            if match := re.search(pattern, sentence):
                stock = rule(stock, *map(int, match.groups()))
                stocks.append(stock)
    return tuple(stocks)


@pytest.mark.parametrize("seed", range(40))
def test_the_answer_is_what_the_story_tells(seed):
    depth = 1 + seed % 8
    problem = make_problem(seed, depth=depth, largest=10 ** (1 + seed % 4), distractors=seed % 5)
    assert read_story(problem.text) == problem.milestones
    assert len(problem.milestones) == depth
    assert all(isinstance(stock, int) and stock >= 1 for stock in problem.milestones)
    assert [evaluate(text).value for text in problem.expressions] == list(problem.milestones)


def test_calculator_rewards_by_hand():
    env = Calculator(depth=2)
    env.reset(seed=4)
    one, two = env._problem.milestones
    first, second = env._problem.expressions

    def play(*calls):
        env.reset(seed=4)
        for name, argument in calls:
            getattr(env, name)(argument)
        return env.get_reward()

    assert play() == 0.0
    assert play(("submit", two)) == 1.0  # who can do it in the head may
    assert play(("submit", two + 1)) == 0.05
    assert play(("calculate", "1 +")) == 0.0
    assert play(("calculate", "1")) == 0.05
    assert play(("calculate", first)) == pytest.approx(0.05 + 0.15)
    assert play(("calculate", second)) == 0.05  # not before the first step
    assert play(("calculate", str(one))) == 0.05  # a number alone was not computed
    assert play(("calculate", first), ("calculate", second), ("submit", 0)) == pytest.approx(0.4)
    whole = second.replace(str(one), f"({first})", 1)
    assert evaluate(whole).value == two
    assert play(("calculate", whole)) == pytest.approx(0.35)  # all steps in one expression
    assert play(("calculate", first), ("submit", two)) == 1.0


def test_calculator_knobs():
    env = Calculator()
    assert [len(read_story(env.reset(seed=1, depth=depth))) for depth in (1, 5, 12)] == [1, 5, 12]
    assert max(map(int, re.findall(r"\d+", env.reset(seed=1, largest=10)))) <= 75  # 75 percent at most
    assert max(map(int, re.findall(r"\d+", env.reset(seed=1, largest=10_000)))) > 1000
    assert env.reset(seed=1, distractors=3).count(".") == env.reset(seed=1).count(".") + 3
    env.reset(seed=1, max_calls=2)
    assert (env.calculate("1+1"), env.done, env.calculate("2"), env.done) == ("2", False, "2", True)


# --- guess a number --------------------------------------------------------------------
@pytest.mark.parametrize("hints", ["direction", "warmth"])
@pytest.mark.parametrize("highest", [2, 3, 7, 8, 31, 100, 127])
def test_gold_finds_every_number_within_par_from_hints_alone(hints, highest):
    env = GuessNumber(highest, hints=hints)
    for secret in range(1, highest + 1):
        env.reset(seed=0)
        env._secret = secret
        while not env.done:
            step(env, env._gold())
        assert env._guesses[-1] == secret
        assert len(env._guesses) <= par(highest, hints)
        assert env.get_reward() == 1.0


def test_guess_number_hints_and_rewards_by_hand():
    env = GuessNumber(highest=100, tries=9)
    env.reset(seed=0)
    env._secret = 40
    assert env.get_reward() == 0.0
    assert env.guess(50) == "lower than 50, 8 tries left"
    assert env.get_reward() == pytest.approx(0.4 * (1 - 2.3978952728 / 4.605170186))  # distance 10: ln 11 / ln 100
    assert env.guess(39) == "higher than 39, 7 tries left"
    assert env.guess(101) == "The number must be from 1 to 100. This cost no try."
    for _ in range(5):
        env.guess(1)
    assert env.guess(1) == "higher than 1, 1 tries left"
    assert env.get_reward() == pytest.approx(0.4 * (1 - 0.69314718 / 4.605170186))  # the best guess counts
    assert (env.guess(40), env.done, env.get_reward()) == ("40 is right", True, 0.6)  # the last try; par is 7
    env.reset(seed=0, hints="warmth", tries=20)
    env._secret = 40
    assert [env.guess(n) for n in (10, 50, 30, 90, 90)] == [
        "10 is not it, guess again to compare, 19 tries left",
        "50 is warmer than 10, 18 tries left",
        "30 is as close as 50, 17 tries left",
        "90 is colder than 30, 16 tries left",
        "90 is as close as 90, 15 tries left",
    ]


def test_guess_number_ends_and_its_knobs():
    env = GuessNumber(tries=2)
    env.reset(seed=0)
    env._secret = 9
    assert (env.guess(1), env.guess(2)) == ("higher than 1, 1 tries left", "higher than 2, no tries left: it was 9")
    assert env.done
    env.reset(seed=0)
    for _ in range(12):
        assert not env.done
        env.guess(0)
    assert env.done and env.get_reward() == 0.0
    assert "Tries: 10." in env.reset(seed=0, tries=0)  # par 7 and 3
    assert "Tries: 5." in env.reset(seed=0, tries=5)
    assert "from 1 to 7." in env.reset(seed=0, highest=7)
    secrets = Counter()
    for seed in range(200):
        env.reset(seed=seed, highest=4)
        secrets[env._secret] += 1
    assert set(secrets) == {1, 2, 3, 4} and min(secrets.values()) > 25


# --- wordle ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [("crane", "crane", "GGGGG"), ("allow", "loyal", "YYYY-"), ("geese", "elegy", "YYG--"), ("array", "marry", "YYG-G"),
     ("sassy", "glass", "YY-G-"), ("sense", "geese", "-G-GG"), ("mamma", "gamma", "-GGGG"), ("aabbb", "ccaac", "YY---"),
     ("llama", "small", "YYGY-"), ("eeeee", "there", "--G-G"), ("abbey", "babes", "YYGG-")],
)  # fmt: skip
def test_wordle_marks_duplicate_letters_by_hand(guess, secret, marks):
    assert score(guess, secret) == marks


def second_score(guess, secret):
    """Letter by letter: of each letter as many are coloured as the secret has, green ones first."""
    marks = ["-"] * len(guess)
    for letter in set(guess):
        places = [i for i, g in enumerate(guess) if g == letter]
        green = [i for i in places if secret[i] == letter]
        yellow = [i for i in places if i not in green][: secret.count(letter) - len(green)]
        for i in green:
            marks[i] = "G"
        for i in yellow:
            marks[i] = "Y"
    return "".join(marks)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(*[st.text("abc", min_size=n, max_size=n)] * 2)))
def test_wordle_marks_agree_with_a_second_implementation(pair):
    assert score(*pair) == second_score(*pair)


def test_wordle_words_are_words():
    for length, words in WORDS.items():
        assert len(words) > 450
        assert all(re.fullmatch(f"[a-z]{{{length}}}", word) for word in words)
        assert list(words) == sorted(set(words))


def test_wordle_answers_and_rewards_by_hand():
    env = Wordle(tries=3)
    env.reset(seed=0)
    env._secret = "loyal"
    assert env.get_reward() == 0.0
    assert env.guess(" Allow ") == "a yellow, l yellow, l yellow, o yellow, w grey: 2 tries left"
    assert env.get_reward() == pytest.approx(0.5 * 4 / 10)
    assert env.guess("cat") == "'cat' has 3 letters; a guess must have 5. This cost no try."
    assert env.guess("l0yal") == "'l0yal' is not a word; a guess has letters a to z only. This cost no try."
    assert env.guess("lóyal").startswith("'lóyal' is not a word")
    env.guess("royal")  # no l at the start; o, y, a, l are right
    assert env.get_reward() == pytest.approx(0.5 * 8 / 10)
    assert env.guess("zzzzz").endswith("no tries left, the word was loyal")
    assert (env.done, env.get_reward()) == (True, pytest.approx(0.4))
    env.reset(seed=0)
    env._secret = "loyal"
    assert env.guess("loyal") == "l green, o green, y green, a green, l green: loyal is the word"
    assert (env.done, env.get_reward()) == (True, 1.0)


def test_wordle_knobs():
    env = Wordle()
    for length in (4, 5, 6):
        env.reset(seed=1, length=length)
        assert env._secret in WORDS[length]
    listed = re.search(r"one of: ([^.]*)\.", env.reset(seed=1, choices=8))[1].split(", ")
    assert len(listed) == 8 and env._secret in listed
    assert "one of" not in env.reset(seed=1)
    env.reset(seed=1, guesses="known")
    assert env.guess("zzzzz") == "'zzzzz' is not in the list of words; guess a common English word. This cost no try."
    env.reset(seed=1, tries=1)
    env.guess("zzzzz")
    assert env.done
    env.reset(seed=1)
    for _ in range(16):
        assert not env.done
        env.guess("no")
    assert env.done


def test_wordle_gold_seldom_needs_its_last_resort():
    env, needed = Wordle(), 0
    for seed in range(100):
        env.reset(seed=seed)
        while not env.done:
            needed += len(env._guessed) == 5 and len(env._possible()) > 1
            step(env, env._gold())
    assert needed <= 3


# --- their pages -----------------------------------------------------------------------
PAGES = [*GAMES, Retrieval]


def page(game):
    return (Path(inspect.getfile(game)).parent / "README.md").read_text()


def played(game, seed, calls):
    """A transcript as the pages have it."""
    episode, lines, left = gold_episode(game, seed=seed), [], calls
    for message in episode.messages:
        if message["role"] == "assistant":
            if left == 0:
                break
            left -= 1
            made = message["tool_calls"][0]["function"]
            shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in made["arguments"].items())
            text = f"{made['name']}({shown})"
        else:
            text = message["content"]
        lines.append(f"{message['role']:<11}" + text.replace("\n", "\n" + " " * 11))
    more = [f"...        ({len(episode.tool_calls) - calls} more calls)"] if len(episode.tool_calls) > calls else []
    return "\n".join([*lines, *more, f"reward     {episode.reward:g}"])


@pytest.mark.parametrize("game", PAGES, ids=lambda game: game.__name__)
def test_a_page_shows_what_is_played(game):
    (seed,) = re.findall(r"The gold policy on seed (\d+):", page(game))
    (transcript,) = re.findall(r"```text\n(.*?)\n```", page(game), re.DOTALL)
    assert transcript == played(game, int(seed), transcript.count("assistant  "))


@pytest.mark.parametrize("game", PAGES, ids=lambda game: game.__name__)
def test_a_page_lists_every_knob_with_its_default_and_range(game):
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", page(game), re.MULTILINE)
    parameters = inspect.signature(game).parameters
    assert [name for name, _, _ in rows] == list(parameters)
    columns = inspect.signature(game.reset).parameters
    knobs = sys.modules[game.__module__].__dict__.get("KNOBS", {})
    for name, default, told in rows:
        assert json.loads(default) == parameters[name].default
        assert columns[name].default is None
        if name in knobs:
            least, *_, most = knobs[name]
            words = isinstance(least, str)
            wanted = ", ".join(f'"{word}"' for word in knobs[name]) if words else f"{least:g} to {most:.12g}"
            assert told.startswith(wanted), name


def test_pages_tell_what_random_calls_get():
    for game in PAGES:
        (told,) = re.findall(r"Random calls get ([\d.]+) on average", page(game))
        drawn = [play_episode(game, seed=seed, max_tool_calling_iterations=16).reward for seed in range(100)]
        assert f"{sum(drawn) / len(drawn):.2g}" == told, game

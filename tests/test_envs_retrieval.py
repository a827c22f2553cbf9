"""Retrieval: the corpus tells what the question asks, the search is BM25, rewards, knobs and the gold policy."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from agentrl_envs.retrieval import Retrieval, normalised
from agentrl_envs.retrieval.corpus import RELATIONS, make_question, make_world
from agentrl_envs.retrieval.index import Index
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import check_environment, play_episode
from agentrl.environment import Instance
from agentrl.errors import MissingDependency
from agentrl.testing import gold_episode


def gold(env, seed, **row):
    """(first observation, calls and answers, reward) of an episode of the gold policy."""
    seen = []
    first = env.reset(seed=seed, **row)
    while not env.done:
        (call,) = env._gold()["tool_calls"]
        seen.append((call["name"], getattr(env, call["name"])(**call["arguments"])))
        assert len(seen) < 50
    return first, seen, env.get_reward()


# --- the corpus ------------------------------------------------------------------------
def pattern(template, **holes):
    """A regular expression for a sentence of this template."""
    text = re.escape(template)
    for hole, name in holes.items():
        text = text.replace(re.escape(hole), f"(?P<{name}>.+?)", 1).replace(re.escape(hole), "(?:.+?)")
    return re.compile(f"^{text}$")


class Reader:
    """Answers a question from the texts of the documents alone."""

    def __init__(self, world):
        self.told = {}
        for document in world.documents:
            for relation in (r for r in RELATIONS if r.of == document.kind):
                sentence = pattern(relation.told, **{"{a}": "a", "{b}": "b"})
                matches = [sentence.match(text) for text in document.sentences]
                found = [match["b"] for match in matches if match and match["a"] == document.title]
                assert len(found) == 1, (document.title, relation.name, found)
                self.told[document.title, relation.name] = found[0]

    def read(self, phrase):
        """(the entity or value that a phrase or a question means, documents looked up)."""
        for relation in RELATIONS:
            match = pattern(relation.asked, **{"{}": "x"}).match(phrase)
            if match:
                entity, steps = self.read(match["x"])
                if (entity, relation.name) in self.told:
                    return self.told[entity, relation.name], steps + 1
        return phrase, 0


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_the_answer_stands_in_the_documents_as_many_of_them_away_as_asked(hops):
    for seed in range(6):
        world = make_world(seed, 40, 2)
        question = make_question(world, hops, random.Random(seed))
        assert Reader(world).read(question.text) == (question.answer, hops)
        assert len(set(question.way)) == len(question.way) == hops
        assert question.way[0] in question.text
        assert not any(title in question.text for title in question.way[1:])
        assert question.answer not in question.text


def test_worlds_have_the_documents_asked_for_and_no_name_twice():
    for documents in (30, 61, 300):
        world = make_world(5, documents, 1)
        assert len(world.documents) == documents == len({d.title for d in world.documents})
        kinds = Counter(d.kind for d in world.documents)
        assert set(kinds) == {"person", "town", "company"} and min(kinds.values()) >= documents // 4
        assert world == make_world.__wrapped__(5, documents, 1) != make_world(6, documents, 1)
        families = Counter(d.title.split()[-1] for d in world.documents if d.kind == "person")
        assert max(families.values()) > 1  # a name alone does not find a person


def test_nothing_is_told_twice_in_two_ways():
    world = make_world(1, 60, 4)
    for document in world.documents:
        assert len(set(document.sentences)) == len(document.sentences)
        assert sum(s.startswith("The mayor of") for s in document.sentences) == (document.kind == "town")


# --- the search ------------------------------------------------------------------------
TEXTS = [
    "Anna keeps bees",
    "Bees and bees and more bees sing",
    "Bruno keeps a mill by the river",
    "the of and",
    "Mill road",
]


def bm25(texts, query, k1=1.5, b=0.75):
    """Scores by Robertson's formula with Lucene's idf, without the stop words that stand in these texts."""
    stop = {"and", "a", "by", "the", "of"}
    split = [[w for w in re.findall(r"\w+", t.lower()) if w not in stop] for t in texts]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        score = 0.0
        for term in re.findall(r"\w+", query.lower()):
            tf, df = words.count(term), sum(term in other for other in split)
            idf = math.log(1 + (len(split) - df + 0.5) / (df + 0.5))
            score += idf * tf / (tf + k1 * (1 - b + b * len(words) / mean)) if tf else 0.0
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["bees", "keeps mill", "Bruno BEES sing", "river, river mill", "anna bees mill"])
def test_search_ranks_as_bm25_by_hand(query):
    scores = bm25(TEXTS, query)
    expected = sorted((i for i in range(len(TEXTS)) if scores[i] > 0), key=lambda i: -scores[i])
    assert Index(TEXTS).search(query, 5) == expected
    assert Index(TEXTS).search(query, 1) == expected[:1]


def test_search_breaks_ties_by_order_and_finds_nothing_where_there_is_nothing():
    index = Index(["same words", "other", "same words", "same words"])
    assert index.search("same", 9) == [0, 2, 3]
    for query in ("", "zzz", "the", "...", "é漢😀"):
        assert index.search(query, 5) == []


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_query_is_answered(text):
    env = Retrieval(documents=30)
    env.reset(seed=1)
    assert 0 < len(env.search(text)) < 600


def test_search_finds_each_document_by_its_title():
    env = Retrieval(documents=80, max_calls=100)
    env.reset(seed=2)
    for place, document in enumerate(env._world.documents):
        assert f"d{place + 1}: {document.title}, {document.kind}" in env.search(document.title)[:400].split("\n")


def test_nothing_is_printed(capfd):
    gold(Retrieval(documents=31), 12345)
    assert capfd.readouterr() == ("", "")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(MissingDependency, match=r"Retrieval needs the package 'bm25s'.*\[search\]"):
        Retrieval()


# --- the environment -------------------------------------------------------------------
def test_its_check_is_clean():
    assert [str(f) for f in check_environment(Retrieval) if f.level != "note"] == []


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_gold_gets_the_top_reward_on_every_seed(hops):
    env = Retrieval()
    for seed in range(25 if hops == 2 else 8):
        _, seen, reward = gold(env, seed, hops=hops)
        assert reward == 1.0 == Retrieval.reward_range[1]
        assert [name for name, _ in seen].count("read") == hops
    assert gold_episode(Retrieval, {"hops": hops}, seed=99).reward == 1.0


def test_random_play_is_between_nothing_and_gold():
    env = Retrieval()
    env.reset(seed=0)
    assert env.get_reward() == 0.0
    drawn = [play_episode(env, seed=seed, max_tool_calling_iterations=16).reward for seed in range(60)]
    assert all(0.0 <= reward <= 0.4 for reward in drawn)
    assert 0.005 < sum(drawn) / len(drawn) < 0.2


def test_rewards_and_answers_by_hand():
    env = Retrieval(hops=2)
    env.reset(seed=4)
    one, two = env._question.way
    right = env._question.answer
    assert env.read("nowhere").startswith("there is no document 'nowhere'; give a number, d1 to d60, from a search")
    assert env.get_reward() == 0.0
    assert env.search("qqqq") == "no document has a word of 'qqqq'; search for a name"
    found = env.search(one)
    assert re.fullmatch(r"d\d+: .+, (person|town|company)", found.split("\n")[0])
    assert one in found and env.get_reward() == pytest.approx(0.05 + 0.35 * 0.25 * (1 + (two in found)) / 2)
    text = env.read(one.upper())
    assert two in text and env.get_reward() >= 0.05 + 0.35 * 0.5
    number = next(i for i, d in enumerate(env._world.documents) if d.title == two) + 1
    assert right in env.read(f" D{number} ")
    assert env.get_reward() == pytest.approx(0.4)
    copy = pickle.loads(pickle.dumps(env))
    assert (env.answer("no"), env.done, env.get_reward()) == ("wrong", True, pytest.approx(0.4))
    assert env.answer(right) == env.search(one) == env.read(one) == "The episode is over."
    assert (copy.answer(f" The {right.upper()}. "), copy.done, copy.get_reward()) == ("right", True, 1.0)
    other = Retrieval(hops=2)
    other.reset(seed=4)
    assert (other.answer(right), other.get_reward()) == ("right", 1.0)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [("the River Olmar", "olmar", True), ("in 1873", "1873.", True), ("Smoked  Eel!", "smoked eel", True),
     ("ｅｅｌ", "eel", True), ("eel smoked", "smoked eel", False), ("187", "1873", False), ("", "eel", False),
     ("eel or fig bread", "eel", False)],
)  # fmt: skip
def test_answers_are_compared_after_normalisation(one, two, same):
    assert (normalised(one) == normalised(two)) == same


def test_knobs():
    env = Retrieval()
    for hops in (1, 4):
        env.reset(seed=1, hops=hops)
        assert len(env._question.way) == hops
    assert "in 200 documents" in env.reset(seed=1, documents=200)
    assert "d1 to d200" in env.read("d201") and "d1 to" not in env.read("d200")
    lengths = []
    for asides in (0, 2, 4):
        env.reset(seed=1, asides=asides)
        lengths.append(len(env.read("d1").split(". ")))
    assert lengths == sorted(set(lengths))
    env.reset(seed=1, max_calls=1)
    env.search("a")
    assert env.done
    assert "Calls: 22." in env.reset(seed=1, hops=4) and "Calls: 14." in env.reset(seed=1)
    for knobs in ({"hops": 5}, {"documents": 29}, {"asides": 1.5}, {"max_calls": "9"}):
        with pytest.raises(ValueError, match=f"{next(iter(knobs))} must be a whole number from"):
            env.reset(seed=1, **knobs)
        with pytest.raises(ValueError, match="must be a whole number from"):
            Retrieval(**knobs)


def test_seeds_determine_everything_and_vary_and_nothing_is_left_over():
    env = Retrieval()
    played = [gold(env, seed) for seed in range(8)]
    assert [gold(Retrieval(), seed) for seed in range(8)] == played
    assert len({first for first, _, _ in played}) == 8
    assert [gold(env, seed) for seed in (7, 7, 3)] == [played[7], played[7], played[3]]
    env.reset(seed=3)
    assert env.get_reward() == 0.0 and not env.done
    env.reset(seed=None)
    assert env.get_reward() == 0.0


def test_many_threads_share_the_corpora():
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: gold(Retrieval(documents=33), 7 + i % 2), range(24)))
    assert together == [gold(Retrieval(documents=33), 7 + i % 2) for i in range(24)]


def test_hostile_arguments_are_answered_in_text():
    async def answer(name, arguments):
        instance = Instance(Retrieval(documents=30))
        await instance.reset({"seed": 3})
        return await instance.call(instance.tools[name], arguments)

    for name, key in (("search", "query"), ("read", "document"), ("answer", "text")):
        for value in ("", "x" * 100_000, "é漢😀", "<|im_end|>", "\x00", "d0", "d-1", "d99999999999999999999"):
            result = asyncio.run(answer(name, {key: value}))
            assert result.error is None and 0 < len(result.content) < 900
        for value in (1, None, ["d1"], {"a": 1}, 1.5, True):
            result = asyncio.run(answer(name, {key: value}))
            assert result.error in (None, "bad_arguments") and result.content

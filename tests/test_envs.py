"""The ready environments keep the promises of every environment, and their own."""

from __future__ import annotations

import asyncio
import itertools

import agentrl_envs
import gymnasium
import pytest
from agentrl_envs.courier import PEOPLE, Courier
from agentrl_envs.courier import PLACES as HOMES
from agentrl_envs.hunt import PLACES, Hunt

from agentrl.check import check_environment
from agentrl.environment import Instance
from agentrl.registry import make


def ids():
    agentrl_envs.register_all()
    return sorted(id for id in gymnasium.registry if id.startswith("agentrl/"))


@pytest.mark.parametrize("id", ids())
def test_every_shipped_environment_passes_its_check(id):
    assert [str(f) for f in check_environment(id) if f.level != "note"] == []


def play(env, calls, seed=0):
    async def run():
        instance = Instance(env)
        first = await instance.reset({"seed": seed})
        results = []
        for name, argument in calls:
            assert not instance.done
            tool = instance.tools[name]
            (key,) = tool.schema["function"]["parameters"]["properties"]
            results.append((await instance.call(tool, {key: argument})).content)
        return first, results, instance.done, await instance.reward()

    return asyncio.run(run())


def test_hunt_is_solved_by_following_the_clues():
    env = make("agentrl/Hunt-v0")
    place = env.reset(seed=5).rpartition(" ")[2]
    visited = [place]
    while not env.done:
        answer = env.search(place)
        place = answer.rpartition(" ")[2]
        visited.append(place)
    assert visited[3] == "treasure"
    assert len(visited) == 4
    assert env.get_reward() == 1.0
    first, results, done, reward = play(Hunt(), [("search", p) for p in visited[:3]], seed=5)
    assert first == f"find the treasure, first clue: {visited[0]}"
    assert results == [
        f"in the {visited[0]} a note says: {visited[1]}",
        f"in the {visited[1]} a note says: {visited[2]}",
        f"in the {visited[2]} is the treasure",
    ]
    assert (done, reward) == (True, 1.0)


def test_hunt_ends_after_four_searches_and_scores_hops():
    env = Hunt()
    start = env.reset(seed=1).rpartition(" ")[2]
    wrong = next(p for p in PLACES if p not in env._chain)
    _, results, done, reward = play(Hunt(), [("search", start)] + [("search", wrong)] * 3, seed=1)
    assert results[1:] == [f"nothing in the {wrong}"] * 3
    assert done
    assert reward == pytest.approx(1 / 3)


def test_hunt_starts_differ_between_seeds_and_chance_is_low():
    starts = {Hunt().reset(seed=s) for s in range(60)}
    assert len(starts) == len(PLACES)
    env, scores = Hunt(), []
    for calls in itertools.islice(itertools.product(PLACES, repeat=4), 0, None, 7):
        env.reset(seed=3)
        for place in calls:
            if not env.done:
                env.search(place)
        scores.append(env.get_reward())
    assert sum(scores) / len(scores) < 0.35


def test_courier_pays_for_the_delivery_and_a_little_for_asking():
    env = Courier()
    person = env.reset(seed=2).removeprefix("parcel for ")
    home = env._homes[person]
    away = next(p for p in HOMES if p != home)
    other = next(p for p in PEOPLE if p != person)
    first, results, done, reward = play(Courier(), [("lookup", person), ("deliver", home)], seed=2)
    assert first == f"parcel for {person}"
    assert results == [f"{person} lives at the {home}", f"delivered at the {home}"]
    assert (done, reward) == (True, 1.0)
    for calls, expected in [
        ([("lookup", person), ("deliver", away)], 0.3),
        ([("lookup", other), ("deliver", away)], 0.0),
        ([("lookup", person)] * 3, 0.3),
        ([("deliver", home)], 1.0),
    ]:
        *_, done, reward = play(Courier(), calls, seed=2)
        assert (done, reward) == (True, expected)
    _, results, done, reward = play(Courier(), [("deliver", away)], seed=2)
    assert (results, done, reward) == ([f"nobody at the {away}"], True, 0.0)


def test_bad_settings_are_refused():
    for wrong in (lambda: Hunt(hops=0), lambda: Hunt(hops=9), lambda: Hunt(max_calls=0), lambda: Courier(max_calls=0)):
        with pytest.raises(ValueError, match="must be"):
            wrong()

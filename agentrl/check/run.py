"""The whole check of one environment, from the factory to the last `close`."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from agentrl.check.policies import play_no_op, play_random
from agentrl.check.probes import TIMEOUT_S, Probe
from agentrl.check.report import ORDER, CheckReport, Finding, RewardSpread
from agentrl.environment import Instance, method_problems
from agentrl.errors import AgentRLError, EnvironmentFailed
from agentrl.pool import EnvironmentPool, validate_environment
from agentrl.registry import resolve

EPISODES = 16  # of the random policy
BUDGET_S = 20.0  # after which no further episode of it begins


def check_environment(
    env_or_factory: Any, *, rows: Sequence[Mapping[str, Any]] | None = None, seed: int = 0
) -> list[Finding]:
    """What is wrong with an environment, errors first; without errors it can be trained on.

    Its tools are described; `reset` gives the same start for the same seed and another for another; a used instance
    is as good as a new one after it; random calls neither break it nor end differently when they are repeated;
    `get_reward` gives the same number twice.

    Args:
        env_or_factory: A class, a function that builds one, a registered id, or an instance (which is not closed).
        rows: Dataset rows to reset with; one empty row if None.
        seed: Of the random calls and of the resets.

    Example:
        >>> class Broken:
        ...     def reset(self):
        ...         return "Say hello."
        ...     def greet(self, name):
        ...         return f"hello {name}"
        >>> for finding in check_environment(Broken):
        ...     print(finding)
        error: Broken.greet has no docstring. Describe it and its arguments (Google style), or start its name with \
an underscore if it is not a tool.
    """
    return list(examine_environment(env_or_factory, rows=rows, seed=seed).findings)


def examine_environment(
    env_or_factory: Any,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    episodes: int = EPISODES,
) -> CheckReport:
    """The findings of `check_environment`, with the numbers behind them.

    Args:
        env_or_factory: As there.
        rows: As there.
        seed: As there.
        episodes: How many the random policy plays; none are begun after 20 seconds.
    """
    examination = _Examination([dict(row) for row in rows] if rows else [{}], seed, episodes)
    _run(examination.everything(env_or_factory))
    return examination.report()


class _Examination:
    def __init__(self, rows: list[dict[str, Any]], seed: int, episodes: int) -> None:
        self.rows, self.seed, self.episodes = rows, seed, episodes
        self.findings: list[Finding] = []
        self.probe: Probe | None = None
        self.rewards: dict[str, list[float]] = {}

    def report(self) -> CheckReport:
        findings = sorted(dict.fromkeys(self.findings), key=lambda finding: ORDER[finding.level])
        spreads = {name: RewardSpread.of(values) for name, values in self.rewards.items() if values}
        if self.probe is None:
            return CheckReport("", tuple(findings), spreads)
        return CheckReport(
            self.probe.name,
            tuple(findings),
            spreads,
            self.probe.medians(),
            self.probe.observation,
            tuple(tool.schema for tool in self.probe.one.tools.values()),
        )

    def add(self, level: Any, what: str) -> None:
        self.findings.append(Finding(level, what))

    async def everything(self, given: Any) -> None:
        is_instance = not isinstance(given, (type, str)) and hasattr(type(given), "reset")
        pool: EnvironmentPool | None = None
        instances: list[Instance] = []
        try:
            factory = None if is_instance else resolve(given)
            cls = type(given) if is_instance else factory
            problems = method_problems(cls) if isinstance(cls, type) else []
            for problem in problems:
                self.add("error", problem)
            if problems:
                return
            if factory is None:
                validate_environment(given, type(given))
                instances = [Instance(given, owned=False)]
            else:
                pool = EnvironmentPool(factory)
                instances = [await pool.acquire() for _ in range(3)]
            await self.examine(factory, instances)
        except AgentRLError as error:
            self.add("error", str(error))
        finally:
            for instance in instances:
                await instance.close(TIMEOUT_S)
            if pool is not None:
                await pool.close()
        errors = [instance.close_error for instance in instances if instance.close_error is not None]
        if errors:
            self.add("error", f"{instances[0].name}.close() failed: {errors[0]}.")

    async def examine(self, factory: Any, instances: list[Instance]) -> None:
        self.probe = Probe(instances, self.rows, self.seed, self.add)
        await self.probe.everything()
        if any(finding.level == "error" for finding in self.findings):
            return
        self.note_pickling(factory, instances[0])
        await self.play_policies(instances[0])

    def note_pickling(self, factory: Any, instance: Instance) -> None:
        """Plain pickling is no condition: worker processes get their objects by cloudpickle."""
        for what, value in (
            (f"The factory of {instance.name}", factory),
            (f"An instance of {instance.name}", instance.env),
        ):
            if value is None:
                continue
            try:
                pickle.dumps(value)
            except Exception as error:  # pickling runs the environment's own code
                reason = f"{type(error).__name__}: {str(error)[:120]}"
                self.add("note", f"{what} cannot be pickled ({reason}). Only tools that pickle by name need that.")

    async def play_policies(self, instance: Instance) -> None:
        if not callable(getattr(instance.env, "get_reward", None)):
            return
        try:
            for row in self.rows[: self.episodes]:
                self._got("no-op", await play_no_op(instance, row, self.seed))
            loop = asyncio.get_running_loop()
            end = loop.time() + BUDGET_S
            for episode in range(self.episodes if instance.tools else 0):
                row = self.rows[episode % len(self.rows)]
                self._got("random", await play_random(instance, row, self.seed + episode))
                if loop.time() > end:
                    self.add("note", f"The random policy was stopped after {episode + 1} episodes: they are slow.")
                    break
        except EnvironmentFailed as failure:
            self.add("error", f"{failure} (in an episode of the random policy)")
        self.judge_rewards(instance.name)

    def _got(self, policy: str, reward: float | None) -> None:
        if reward is not None:
            self.rewards.setdefault(policy, []).append(reward)

    def judge_rewards(self, name: str) -> None:
        for policy, values in self.rewards.items():
            what = "Doing nothing" if policy == "no-op" else "The random policy"
            self.add("note", f"{what} in {name} gets reward {RewardSpread.of(values)}.")
        drawn = self.rewards.get("random", [])
        if len(drawn) >= 8 and len(set(drawn)) == 1:
            self.add(
                "note",
                f"Every random episode of {name} got the same reward: a policy that begins there has nothing to learn "
                "from. Reward steps on the way, or warm the policy up.",
            )


def _run(work: Coroutine[Any, Any, None]) -> None:
    """The coroutine has run, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    raised: list[BaseException] = []

    def target() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]

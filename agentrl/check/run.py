"""The whole check of one environment, from the factory to the last `close`."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.check.crowd import Crowd, acquire
from agentrl.check.hostile import Hostile
from agentrl.check.places import source_of, told
from agentrl.check.player import Player
from agentrl.check.policies import Gold, Policies, gold_of, reward_range_of
from agentrl.check.probes import Probe
from agentrl.check.report import ORDER, CheckReport, Finding, Level, RewardSpread
from agentrl.check.rewards import judge_range, judge_rewards
from agentrl.check.tokens import TokenCost, token_cost
from agentrl.check.watch import Abandoned, Watch
from agentrl.environment import Instance, method_problems
from agentrl.errors import ConfigurationError, EnvironmentFailed
from agentrl.lane import attempt
from agentrl.pool import EnvironmentPool, validate_environment
from agentrl.registry import resolve

EPISODES = 16  # of the random policy
GOLD_EPISODES = 5
TIMEOUT_S = 30.0  # for each reset, call and score
BUDGET_S = 5.0  # for each part of the check; then it begins nothing further
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check is asked to do."""

    rows: list[dict[str, Any]]
    seed: int
    episodes: int
    timeout: float
    gold: Gold | None


def check_environment(
    env_or_factory: Any,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    gold: Gold | None = None,
    timeout: float = TIMEOUT_S,
) -> list[Finding]:
    """What is wrong with an environment, errors first; without errors it can be trained on.

    Its tools are described; `reset` gives the same start for the same seed and another for another; a used instance
    is as good as a new one after it; 16 instances at once play what one plays alone; calls that are given up in the
    middle leave nothing behind; random calls neither break it nor end differently when they are repeated; bad
    arguments are answered in text; `get_reward` gives the same number twice and stays in `reward_range`; its gold
    policy reaches the top of that, and doing nothing does not.

    Args:
        env_or_factory: A class, a function that builds one, a registered id, or an instance (which is not closed).
        rows: Dataset rows to reset with; one empty row if None.
        seed: Of the random calls and of the resets.
        gold: A policy that gets the top reward, ``f(env, messages) -> text or message``; None: the environment's own
            method `_gold`, where it has one.
        timeout: Seconds for each reset, call and score.

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
    return list(examine_environment(env_or_factory, rows=rows, seed=seed, gold=gold, timeout=timeout).findings)


def examine_environment(
    env_or_factory: Any,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    episodes: int = EPISODES,
    gold: Gold | None = None,
    timeout: float = TIMEOUT_S,
    tokenizer: Any = None,
    tokenizer_name: str = "",
) -> CheckReport:
    """The findings of `check_environment`, with the numbers behind them.

    Args:
        env_or_factory: As there.
        rows: As there.
        seed: As there.
        episodes: How many the random policy plays; none are begun after 5 seconds.
        gold: As there.
        timeout: As there.
        tokenizer: Counts the tokens of the tools; None: one token per byte.
        tokenizer_name: For the record.

    Raises:
        ConfigurationError: A timeout that is no positive number, or a tokenizer whose template cannot be used.
    """
    if not timeout > 0:
        raise ConfigurationError(f"The timeout of a check must be more than 0 seconds, not {timeout:g}.")
    plan = Plan([dict(row) for row in rows] if rows else [{}], seed, episodes, timeout, gold)
    examination = _Examination(plan)
    stuck = examination.watch.run(examination.everything(env_or_factory))
    if stuck is not None:
        examination.leave(stuck)
    examination.tell_shared()
    cost = examination.token_cost(tokenizer, tokenizer_name) if stuck is None else None
    return examination.report(cost)


class _Examination:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.watch = plan, Watch(plan.timeout)
        self.findings: list[Finding] = []
        self.player: Player | None = None
        self.probe: Probe | None = None
        self.policies: Policies | None = None
        self.pool: EnvironmentPool | None = None
        self.instances: list[Instance] = []
        self.source = ""  # the environment's file

    # --- the report --------------------------------------------------------------------
    def tell_shared(self) -> None:
        """A warning for each thing that the environment changed for the whole process."""
        name = self.player.name if self.player is not None else "The environment"
        for what in self.watch.shared.changes():
            self.add("warning", f"{name} {what}, for the whole process: other environments and the trainer share it.")

    def add(self, level: Level, what: str) -> None:
        self.findings.append(Finding(level, what))

    def token_cost(self, tokenizer: Any, name: str) -> TokenCost | None:
        """Of a first prompt; None where the check did not get that far."""
        if self.probe is None or any(finding.level == "error" for finding in self.findings):
            return None
        schemas = [tool.schema for tool in self.probe.one.tools.values()]
        return token_cost(schemas, [{"role": "user", "content": self.probe.observation or "x"}], tokenizer, name=name)

    def report(self, cost: TokenCost | None) -> CheckReport:
        findings = tuple(sorted(dict.fromkeys(self.findings), key=lambda finding: ORDER[finding.level]))
        if cost is not None and self.probe is not None:
            what = f"its tools take {cost.tools} of the {cost.prompt} tokens of a first prompt"
            findings += (Finding("note", f"{self.probe.name}: {what}, with the {cost.tokenizer}."),)
        rewards = self.policies.rewards if self.policies is not None else {}
        spreads = {name: RewardSpread.of(values) for name, values in rewards.items() if values}
        if self.probe is None:
            return CheckReport("", findings, spreads)
        schemas = tuple(tool.schema for tool in self.probe.one.tools.values())
        times = self.probe.milliseconds
        return CheckReport(self.probe.name, findings, spreads, times, self.probe.observation, schemas, cost)

    def leave(self, stuck: str) -> None:
        """The check is given up; what it built is closed as far as that goes."""
        self.add(
            "error",
            f"{stuck} did not return within {self.plan.timeout:g} s, and nothing else could run meanwhile. "
            "Give what it waits for a deadline; with run_inline = True it would stop the whole run.",
        )
        for instance in self.instances:
            if not instance.inline:  # an inline close() would run here, beside the call that hangs
                instance.close_nowait()

    # --- the check ---------------------------------------------------------------------
    async def everything(self, given: Any) -> None:
        try:
            factory = await self._build(given)
            if self.instances:
                await self._examine(factory)
        except (Abandoned, asyncio.CancelledError):
            raise
        except BaseException as error:  # on this thread, also KeyboardInterrupt is the environment's own
            self.add("error", told(error, self.source))
        finally:
            await self._close()

    async def _build(self, given: Any) -> Any:
        """Three instances are built, or one was given; the factory, None for an instance."""
        is_instance = not isinstance(given, (type, str)) and hasattr(type(given), "reset")
        with self.watch.doing(f"building {given if isinstance(given, str) else source_name(given)}"):
            factory = None if is_instance else resolve(given)
            cls = type(given) if is_instance else factory
            self.source = source_of(cls)
            problems = method_problems(cls) if isinstance(cls, type) else []
            for problem in problems:
                self.add("error", problem)
            if problems:
                return None
            if factory is None:
                validate_environment(given, type(given))
                self.instances.append(Instance(given, owned=False))
            else:
                self.pool = EnvironmentPool(factory)
                for _ in range(3):
                    self.instances.append(await acquire(self.pool, self.plan.timeout))
        self.source = source_of(self.instances[0].env)
        return factory

    async def _examine(self, factory: Any) -> None:
        one, plan = self.instances[0], self.plan
        player = self.player = Player(one.name, self.add, self.watch)
        probe = self.probe = Probe(player, self.instances[:3], plan.rows, plan.seed)
        await probe.everything()
        if player.scores:
            self._check_pickling(factory, one)
            await self._stage(self._play_policies(one))
            if probe.one_task and (self.policies is None or len(self.policies.solutions) < 2):
                self.add("note", probe.one_task)
            await self._stage(Hostile(player, probe, self.instances[-1], BUDGET_S).everything())
            if self.pool is not None and one.tools:
                crowd = Crowd(player, probe, self.pool, BUDGET_S)
                if probe.steady and not any(instance.broken for instance in self.instances):
                    await self._stage(crowd.side_by_side(self.instances))
                await self._stage(crowd.cancelled())
        player.report_raises(one.tools)

    async def _stage(self, work: Awaitable[None]) -> None:
        """A part of the check has run; where the environment broke in it, that is a finding, and the next may run."""
        try:
            await work
        except EnvironmentFailed as error:
            self.add("error", told(error, self.source))

    async def _play_policies(self, instance: Instance) -> None:
        player, plan = self.player, self.plan
        assert player is not None
        policies = self.policies = Policies(player, instance, plan.rows, plan.seed, BUDGET_S)
        try:
            limits = reward_range_of(instance.env)
        except ConfigurationError as error:
            return self.add("error", str(error))
        gold = gold_of(instance.env, plan.gold)
        if not callable(getattr(instance.env, "get_reward", None)):
            return
        await policies.play_no_op(plan.episodes)
        await policies.play_random(plan.episodes)
        if gold is None:
            self.add(
                "note",
                f"{instance.name} has no gold policy, so nothing shows that its top reward can be had. "
                "Write a method _gold that returns the best next message, or pass gold=.",
            )
        else:
            await policies.play_gold(gold, GOLD_EPISODES)
        closed = policies.closed_choices()
        for level, what in judge_rewards(
            instance.name, policies.rewards, limits, trouble=policies.trouble, closed=closed
        ):
            self.add(level, what)
        judge_range(instance.name, player.rewards, limits, self.add)

    def _check_pickling(self, factory: Any, instance: Instance) -> None:
        """Worker processes get the factory by cloudpickle; plain pickling is no condition."""
        import cloudpickle  # comes with Gymnasium

        with self.watch.doing(f"pickling {instance.name}"):
            # Only written: reading it here would give classes that are sent by value other closures.
            ok, data = attempt(cloudpickle.dumps, factory) if factory is not None else (True, None)
            if not ok:
                self.add(
                    "error",
                    f"The factory of {instance.name} cannot be sent to another process, not even by cloudpickle "
                    f"({type(data).__name__}: {str(data)[:120]}). Build what it holds (locks, files, connections) "
                    "in __init__ instead.",
                )
                return
            for what, value in (("The factory of", factory), ("An instance of", instance.env)):
                ok, why = attempt(pickle.dumps, value)
                if not ok and value is not None:
                    reason = f"{type(why).__name__}: {str(why)[:120]}"
                    self.add(
                        "note",
                        f"{what} {instance.name} cannot be pickled ({reason}). "
                        "Only tools that pickle by name need that.",
                    )

    async def _close(self) -> None:
        seconds = min(self.plan.timeout, _CLOSE_S)
        with self.watch.doing("close()"):
            await asyncio.gather(*(i.close(seconds) for i in self.instances), return_exceptions=True)
            if self.pool is not None:
                await self.pool.close()
        errors = [instance.close_error for instance in self.instances if instance.close_error is not None]
        if errors:
            self.add("error", f"{self.instances[0].name}.close() failed: {errors[0]}.")


def source_name(given: Any) -> str:
    """What to call a factory.

    >>> source_name(dict)
    'dict()'
    """
    given = getattr(given, "func", given)
    return f"{getattr(given, '__name__', type(given).__name__)}()"

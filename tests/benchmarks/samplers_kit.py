"""What bench_samplers.py measures with: a task of four turns, a policy that plays it, and the trainer's log-probs."""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from agentrl.environment import Environment
from agentrl.pool import EnvironmentPool
from agentrl.render import Renderer
from agentrl.rollout.engine import RolloutEngine, RolloutSettings
from agentrl.rollout.group import GroupPlan, run_groups
from agentrl.rollout.loop import LoopThread
from agentrl.rollout.scoring import Scorer
from agentrl.train import setup
from agentrl.train.log_probs import PolicyForward
from agentrl.train.rows import TrainItem, make_row
from agentrl.types import SampleRequest, SamplingParams, Task, TrainingSequence

CALLS, DIGITS, SHOWN, GROUP_SIZE, BUDGET, STEPS = 4, 24, 6, 8, 224, 300
MOVE = 0.02  # how far a weight moves between two syncs, in standard deviations of its tensor


# --- the task ---
def codes(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("0123456789", k=DIGITS)) for _ in range(count))


class Dial(Environment):
    """Ends after exactly four calls, whatever they say; a digit is a token, so that a turn has about thirty."""

    run_inline = True

    def reset(self, seed: int = 0) -> str:
        self._rng, self._calls, self.done = random.Random(seed), 0, False
        return codes(self._rng, SHOWN)

    def enter(self, code: str) -> str:
        """Enter a code.

        Args:
            code: The code.
        """
        self._calls += 1
        self.done = self._calls >= CALLS
        return codes(self._rng, 1)

    def get_reward(self) -> float:
        return 0.0


def dial_for_trl(watch: Any) -> type:
    """Dial as trl takes environments: every public method is a tool there. `watch` hears of each start."""

    class DialForTrl:
        def __init__(self) -> None:
            self._dial = Dial()

        def reset(self, seed: int = 0, **row: Any) -> str:
            watch.begin()
            return self._dial.reset(seed)

        def get_reward(self) -> float:
            return 0.0

        def enter(self, code: str):
            return self._dial.enter(code)

    DialForTrl.enter.__doc__ = Dial.enter.__doc__
    return DialForTrl


def warm_policy() -> Path:
    """The folder of a tiny model that plays Dial and its tokenizer, with the template under which trl reads calls.

    It is made once and kept under AGENTRL_CACHE. Its heads are 32 wide: vLLM's attention on CPUs needs that much.
    """
    import trl
    from transformers.utils import logging

    from agentrl.train import tiny, warm_up

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    digest = hashlib.blake2b(f"{inspect.getsource(Dial)}{CALLS, DIGITS, SHOWN, STEPS}".encode(), digest_size=8)
    for code in (tiny, warm_up):
        digest.update(Path(str(code.__file__)).read_bytes())
    folder = tiny.cache_root() / f"bench-samplers-{digest.hexdigest()}"
    if (folder / "config.json").exists():
        return folder
    played = warm_up.random_episodes(Dial, tiny.make_tokenizer(), 100)
    plain = tiny.make_tokenizer()
    tokenizer = tiny.make_tokenizer(plain.decode(s.input_ids) for rollout in played for s in rollout.sequences)
    model = tiny.make_model(tokenizer, 0, hidden=128)
    warm_up.warm_up(model, tokenizer, Dial, episodes=STEPS * 2, steps=STEPS, batch_size=16)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.padding_side = "left"
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(folder)
    return folder


@torch.no_grad()
def widened(folder: Path, target: Path, hidden: int = 576, layers: int = 3, inner: int = 1536) -> Path:
    """`target` holds the same policy in layers as large as SmolLM2-135M's: what is added is multiplied by zeros."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    small = Qwen3ForCausalLM.from_pretrained(folder)
    share = small.config.hidden_size / hidden  # of a state that is not zero, which the norms must not see
    settings = small.config.to_dict() | {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner,
        "rms_norm_eps": small.config.rms_norm_eps * share,
    }  # fmt: skip
    settings.pop("layer_types", None)
    wide, weights = Qwen3ForCausalLM(Qwen3Config(**settings)), small.state_dict()
    for name, weight in wide.state_dict().items():
        norm = "layernorm" in name or name == "model.norm.weight"
        if not norm and (name in weights or "o_proj" in name or "down_proj" in name):
            weight.zero_()  # layers that were not there add nothing
        if name in weights:
            old = weights[name] * (share**0.5 if norm else 1.0)
            weight[tuple(slice(size) for size in old.shape)] = old
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    wide.save_pretrained(target)
    return target


def play(sampler: Any, tokenizer: Any, loop: LoopThread, count: int, turn: int) -> dict[str, float]:
    """`count` rollouts of Dial, all in flight at once; another `turn` has other start states and random streams."""
    settings = RolloutSettings(
        max_completion_length=BUDGET, max_concurrent=count, seed=turn, max_tool_calling_iterations=CALLS
    )
    engine = RolloutEngine(sampler, Renderer(tokenizer), {None: EnvironmentPool(Dial)}, settings=settings)
    groups = count // GROUP_SIZE
    plans = [GroupPlan(f"{turn}.{i}", Task(i, 0, turn * groups + i), GROUP_SIZE) for i in range(groups)]
    with Clock() as clock:
        played = loop.run(run_groups(engine, Scorer([]), plans))
    rollouts = [rollout for group in played for rollout in group.rollouts]
    if lost := [rollout.error for rollout in rollouts if rollout.outcome.failed]:
        raise RuntimeError(f"{len(lost)} of {count} rollouts failed: {lost[0]}")
    turns = sum(len(rollout.turns) for rollout in rollouts) / count
    sampled = sum(len(turn.output_ids or ()) for rollout in rollouts for turn in rollout.turns) / count
    return {"wall": clock.wall, "cpu": clock.cpu, "turns": turns, "sampled": sampled, "rollouts": float(count)} | {
        "tokens": sum(len(rollout.completion_ids) for rollout in rollouts) / count
    }


class Clock:
    """Wall seconds, and CPU seconds of this process and of those that it started."""

    wall = cpu = 0.0

    def __enter__(self) -> Clock:
        self.wall, self.cpu = time.perf_counter(), cpu_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, cpu_seconds() - self.cpu


def cpu_seconds() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


# --- sampler and trainer ---
class Turns:
    """Turns of one length from prompts of many lengths, and what the trainer says about their ids."""

    def __init__(self, sampler: Any, model: Any, loop: LoopThread, count: int, tokens: int) -> None:
        self.sampler, self.loop, self.count, self.tokens = sampler, loop, count, tokens
        self.policy = PolicyForward(setup.bare(model), 1.0)
        self.policy.probe()
        vocabulary = setup.bare(model).config.vocab_size
        rng = random.Random(0)
        self.prompts = [rng.choices(range(10, vocabulary), k=rng.randint(5, 90)) for _ in range(count)]
        self.drawn: list[tuple[list[int], list[float]]] = []
        self.rounds = 0

    def draw(self) -> None:
        """`drawn` holds ids and log-probs that the sampler gives now, all requests in flight at once."""
        import asyncio

        self.rounds += 1

        async def one(number: int) -> tuple[list[int], list[float]]:
            name = f"agree-{self.rounds}-{number}"
            seed = (self.rounds, number, 0)
            request = SampleRequest([], [], self.prompts[number], self.tokens, SamplingParams(), seed, name)
            out = await self.sampler.sample(request)
            self.sampler.release(name)
            assert out.ids is not None and out.log_probs is not None and len(out.ids) == len(out.log_probs)
            return out.ids, out.log_probs

        async def all_of_them() -> list[tuple[list[int], list[float]]]:
            return await asyncio.gather(*map(one, range(self.count)))

        self.drawn = self.loop.run(all_of_them())

    @torch.no_grad()
    def difference(self) -> dict[str, float]:
        """How far the log-probs that were drawn are from those of the trainer's weights as they are now."""
        items = []
        for number, (prompt, (ids, log_probs)) in enumerate(zip(self.prompts, self.drawn, strict=True)):
            mask = [False] * len(prompt) + [True] * len(ids)
            sequence = TrainingSequence(prompt + ids, mask, [0.0] * len(prompt) + log_probs)
            items.append(TrainItem(number, (sequence,), 0.0, True))
        row = make_row(items, next(self.policy.model.parameters()).device)
        with self.policy.context(row):
            ours = self.policy.run(row).log_probs_N
        theirs = torch.tensor([value for _, log_probs in self.drawn for value in log_probs])
        off = (ours - theirs).abs()
        return {"max": off.max().item(), "mean": off.mean().item(), "tokens": float(len(off))}

    @torch.no_grad()
    def rounding(self) -> dict[str, float]:
        """How far a plain forward of each turn by itself is from the same in float64: what fp32 alone makes."""
        exact = copy.deepcopy(setup.bare(self.policy.model)).double()

        def says(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            return logits.gather(1, torch.tensor(ids)[:, None])[:, 0].double()

        turns = [(prompt, ids) for prompt, (ids, _) in zip(self.prompts, self.drawn, strict=True)]
        off = torch.cat([says(self.policy.model, *turn) - says(exact, *turn) for turn in turns]).abs()
        return {"max": off.max().item(), "mean": off.mean().item()}


@torch.no_grad()
def perturb(model: Any, seed: int) -> None:
    """Every trainable weight has moved a little, as by a large optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            spread = weight.std().item() if weight.numel() > 1 else 0.0
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(noise * MOVE * (spread or 1.0))


def conversation(sampler: Any, loop: LoopThread, counts: Any, vocabulary: int, number: int) -> list[dict[str, float]]:
    """Per turn of one conversation: tokens in its prompt, those that were new, and those that were fed to the model.

    New is what the engine has not computed: the tool result, and the last sampled id, which no turn feeds.
    """
    rng = random.Random(number)
    held: list[int] = rng.choices(range(10, vocabulary), k=150 + 13 * number)
    lines, name, computed = [], f"talk-{number}", 0
    for turn in range(CALLS):
        before = counts()
        request = SampleRequest([], [], list(held), 32, SamplingParams(), (9, number, turn), name)
        out = loop.run(sampler.sample(request))
        after = counts()
        lines.append({"prompt": len(held), "new": len(held) - computed, "fed": after - before})
        held += out.ids
        computed = len(held) - 1
        held += rng.choices(range(10, vocabulary), k=rng.randint(20, 30))
    sampler.release(name)
    return lines


def median(lines: Sequence[dict[str, float]], key: str) -> float:
    values = sorted(line[key] for line in lines)
    return values[len(values) // 2]

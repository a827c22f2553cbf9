"""The samplers that bench_samplers.py compares, each in a process of its own that does what its parent says.

    python tests/benchmarks/samplers_sides.py SIDE MODEL_FOLDER

A line of JSON with "do" comes in, a line of JSON goes out; libraries print to the error output. When the input ends,
the server that the process started ends too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from samplers_kit import (
    BUDGET,
    CALLS,
    GROUP_SIZE,
    Clock,
    LoopThread,
    Turns,
    conversation,
    dial_for_trl,
    perturb,
    play,
)  # fmt: skip

SERVER_TIMEOUT_S, LORA_RANK, MOST, CONTEXT = 240.0, 8, 64, 2048


@dataclass
class Side:
    """A sampler, the trainer's model beside it, and how weights go from one to the other."""

    model: Any
    sampler: Any
    sync: Callable[[int], dict[str, float]]  # seconds: in all, and how long the sampler was held
    fed: Callable[[], float] | None = None  # prompt tokens that went through the model so far
    block: int = 1  # tokens that are found in the cache together


def embedded(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    from agentrl.sampler import TransformersSampler

    sampler = TransformersSampler(model, tokenizer, max_context=CONTEXT)
    return Side(model, sampler, published(sampler), lambda: float(sampler.prefilled_tokens))


def generate(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    from agentrl.sampler.generate import GenerateSampler

    sampler = GenerateSampler(model, tokenizer, kwargs={}, max_context=CONTEXT)
    ends.callback(sampler.close)
    return Side(model, sampler, published(sampler))


def continuous(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    from agentrl.sampler.continuous import ContinuousSampler

    sampler = ContinuousSampler(model, tokenizer, config={"max_memory_percent": 0.05}, kwargs={}, max_context=CONTEXT)
    ends.callback(sampler.close)
    return Side(model, sampler, published(sampler))


def published(sampler: Any) -> Callable[[int], dict[str, float]]:
    """For samplers of the trainer's own model: nothing travels."""

    def sync(version: int) -> dict[str, float]:
        with Clock() as clock:
            sampler.publish(version)
        return {"total": clock.wall, "pause": clock.wall}

    return sync


def colocate(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    from agentrl.sampler.vllm import ColocateOptions, VLLMSampler
    from agentrl.train.weight_sync import DirectSync

    options = ColocateOptions(model=model.name_or_path, dtype="float32", max_model_len=CONTEXT, max_num_seqs=MOST)
    sampler = VLLMSampler(options)
    ends.callback(sampler.close)
    sync = DirectSync(model, sampler)
    ends.callback(sync.close)

    def fed() -> float:
        counts = sampler.counts()
        return counts["prefix_queries"] - counts["prefix_hits"]

    return Side(model, sampler, timed(sync), fed, sampler.llm.llm_engine.vllm_config.cache_config.block_size)


def server(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    return served(model, loop, ends, {})


def server_lora(model: Any, tokenizer: Any, loop: LoopThread, ends: contextlib.ExitStack) -> Side:
    """The adapter alone is sent."""
    from peft import LoraConfig, get_peft_model

    folder = model.name_or_path
    adapter = LoraConfig(r=LORA_RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, adapter)
    return served(adapted, loop, ends, {"lora_rank": LORA_RANK, "max_loras": 2}, folder)


def served(
    model: Any, loop: LoopThread, ends: contextlib.ExitStack, options: dict[str, Any], folder: str | None = None
) -> Side:
    from agentrl.sampler.vllm import ServerOptions, VLLMServerSampler
    from agentrl.sampler.vllm.launch import start_server
    from agentrl.train.weight_sync import server_sync

    work = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-bench-")))
    started = start_server(
        folder or model.name_or_path, dtype="float32", log=work / "server.log", max_model_len=CONTEXT,
        timeout_s=SERVER_TIMEOUT_S, extra=("--max-num-seqs", str(MOST)), **options,
    )  # fmt: skip
    ends.callback(started.stop)
    sampler = VLLMServerSampler(ServerOptions(started.base_url, timeout_s=SERVER_TIMEOUT_S))
    ends.callback(lambda: loop.run(sampler.close()))
    facts = loop.run(sampler.start(model.config.vocab_size))
    sync = server_sync(model, sampler, lambda work: loop.run(work()), folder=work, timeout_s=SERVER_TIMEOUT_S)
    ends.callback(sync.close)

    def fed() -> float:
        load = loop.run(sampler.load())
        return load.prefix_queries - load.prefix_hits

    return Side(model, sampler, timed(sync), fed, facts.block_size or 0)


def timed(sync: Any) -> Callable[[int], dict[str, float]]:
    def publish(version: int) -> dict[str, float]:
        times = sync.publish(version)
        return {"total": times.total_s, "pause": times.pause_s}

    return publish


SIDES: dict[str, Callable[[Any, Any, LoopThread, contextlib.ExitStack], Side]] = {
    "embedded": embedded,
    "generate": generate,
    "continuous": continuous,
    "server": server,
    "server-lora": server_lora,
    "colocate": colocate,
}


# --- what the parent asks for ---
class Work:
    """Answers the parent's questions about one side."""

    def __init__(self, side: Side, tokenizer: Any, loop: LoopThread) -> None:
        self.side, self.tokenizer, self.loop = side, tokenizer, loop
        self.version = 1
        side.sync(self.version)  # what a run does before its first rollout

    def play(self, count: int, turn: int) -> dict[str, float]:
        return play(self.side.sampler, self.tokenizer, self.loop, count, turn)

    def prefix(self, conversations: int) -> dict[str, Any]:
        if self.side.fed is None:
            return {"lines": []}
        vocabulary = self.side.model.config.vocab_size
        talks = [conversation(self.side.sampler, self.loop, self.side.fed, vocabulary, n) for n in range(conversations)]
        return {"lines": talks, "block": self.side.block}

    def syncs(self, count: int, turns: int, tokens: int, rounding: bool) -> dict[str, Any]:
        """Agreement before and after `count` syncs with other weights each, and their seconds."""
        agreement = Turns(self.side.sampler, self.side.model, self.loop, turns, tokens)
        agreement.draw()
        before = agreement.difference()
        seconds, stale = [], before
        for number in range(count):
            perturb(self.side.model, number)
            stale = stale if number else agreement.difference()
            self.version += 1
            seconds.append(self.side.sync(self.version))
        agreement.draw()
        answer = {"before": before, "after": agreement.difference(), "stale": stale, "seconds": seconds}
        return answer | ({"rounding": agreement.rounding()} if rounding else {})


def serve_parent(name: str, folder: str, channel: Any) -> None:
    with contextlib.ExitStack() as ends:
        loop = LoopThread()
        ends.callback(loop.close)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        work = Work(SIDES[name](model, tokenizer, loop, ends), tokenizer, loop)
        channel.write("ready\n")
        for line in sys.stdin:
            asked = json.loads(line)
            what = asked.pop("do")
            channel.write(json.dumps(getattr(work, what)(**asked)) + "\n")


# --- trl ---
class Watch:
    """trl's generation phase: from the first `reset` of an environment to the first call of a reward function."""

    __name__ = "watch"

    def __init__(self, channel: Any, count: int) -> None:
        self.channel, self.count, self.clock, self.logs = channel, count, Clock(), {}
        self.running, self.waiting = False, False
        self.line: dict[str, float] | None = None

    def begin(self) -> None:
        if not self.running:
            self.running = True
            self.clock.__enter__()

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.clock.__exit__()
        self.running = False
        turns = sum(message["role"] == "assistant" for one in completions for message in one)
        self.line = {"wall": self.clock.wall, "cpu": self.clock.cpu, "rollouts": float(len(completions))} | {
            "turns": turns / len(completions), "tokens": sum(map(len, completion_ids)) / len(completions)
        }  # fmt: skip
        return [0.0] * len(completions)

    def border(self) -> None:
        """A step may begin: the last one's figures are handed over, and the parent's word is awaited."""
        line = "ready" if self.line is None else json.dumps(self.line | {"sampled": self.logs.get("sampled", 0.0)})
        self.channel.write(line + "\n")
        if not sys.stdin.readline():
            sys.exit(0)


def serve_trl(folder: str, channel: Any, count: int, most_steps: int) -> None:
    """Every step of a trainer whose learning rate is 0 is a round of `count` rollouts."""
    import trl
    from datasets import Dataset

    watch = Watch(channel, count)

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.border()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            watch.logs["sampled"] = (logs or {}).get("completions/mean_length", watch.logs.get("sampled", 0.0))

    rows = count // GROUP_SIZE * most_steps
    prompt = [{"role": "user", "content": ""}]
    out = tempfile.mkdtemp(prefix="agentrl-bench-trl-")
    args = trl.GRPOConfig(  # type: ignore[reportPrivateImportUsage]
        output_dir=out, seed=0, max_steps=most_steps, learning_rate=0.0, num_generations=GROUP_SIZE,
        per_device_train_batch_size=count, gradient_accumulation_steps=1, max_completion_length=BUDGET,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        log_level="error", use_cpu=True, bf16=False, max_tool_calling_iterations=CALLS - 1,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(  # type: ignore[reportPrivateImportUsage]
        model=transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=watch,  # type: ignore[arg-type]
        train_dataset=Dataset.from_list([{"prompt": prompt, "seed": seed} for seed in range(rows)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder), args=args,
        environment_factory=dial_for_trl(watch),  # type: ignore[arg-type]
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Steps())
    trainer.train()


def main() -> None:
    name, folder, *numbers = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no part of the channel
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if name == "trl":
        serve_trl(folder, channel, *map(int, numbers))
    else:
        serve_parent(name, folder, channel)


if __name__ == "__main__":
    main()

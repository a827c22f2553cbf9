"""The sampler of a run: which engine draws its rollouts, and how the policy's weights come to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from agentrl.errors import RunStopped
from agentrl.rollout.loop import LoopThread
from agentrl.train import setup
from agentrl.train.engine_options import Drawn, table

if TYPE_CHECKING:
    from agentrl.train.config import GRPOConfig
    from agentrl.train.weight_sync import SyncTimes, WeightSync


CHECKS = 2
"""Syncs that are checked: the first may change nothing, where the engine was built with the same weights."""


@dataclass(slots=True)
class PolicySampler:
    """A sampler that holds the weights of the policy whenever `publish` has run.

    Args:
        sampler: What draws the turns.
        max_context: Tokens that it can see; None: as many as the model.
        exact: Its log-probs are those of the trainer's own forward, up to fp32 rounding.
        model: The policy.
        sync: What brings weights to another engine; None for samplers of the trainer's own model.
        sleeps: The engine gives its memory back between generation phases.
        ranks: How many make up one engine (tensor parallelism); the first of them samples.
        rank: Of this process among them.
        check: Run behind the first two syncs, on the rank that samples: the engine draws from the weights that it was
            sent. Returns what is wrong.
        first_error: Of several ranks' errors the first, on every rank.
        closers: Called last to first when the run ends.
    """

    sampler: Any
    max_context: int | None
    exact: bool
    model: torch.nn.Module
    sync: WeightSync | None = None
    closers: list[Callable[[], Any]] = field(default_factory=list)
    sleeps: bool = False
    check: Callable[[], Exception | None] | None = None
    first_error: Callable[[str | None], str | None] = lambda error: error
    ranks: int = 1
    rank: int = 0
    asleep: bool = False
    _checks: int = 0

    def publish(self, version: int) -> SyncTimes | None:
        """Turns from now on are drawn from the weights of now. Collective; the seconds where weights were sent."""
        if self.sync is None:
            self.sampler.publish(version)
            return None
        if self.asleep:
            self.sampler.wake()
        times = self.sync.publish(version)
        self.asleep = False
        if self.check is not None and self._checks < CHECKS:
            self._checks += 1
            self._compare(self.check)
        return times

    def _compare(self, check: Callable[[], Exception | None]) -> None:
        with self.together() as samples:
            error = check() if samples else None
        found = self.first_error(None if error is None else str(error))
        if found is not None:
            raise RunStopped(found) from error

    @contextlib.contextmanager
    def together(self) -> Iterator[bool]:
        """True on the rank that samples; the others of its engine do their part of each step before this begins."""
        if self.rank:
            self.sampler.follow()
        try:
            yield self.rank == 0
        finally:
            if self.ranks > 1 and self.rank == 0:
                self.sampler.dismiss()

    def rest(self) -> None:
        """Memory on the accelerator is free for training, where the sampler can give it back."""
        if self.sleeps:
            self.sampler.sleep()
            self.asleep = True
        elif self.sync is None and next(self.model.parameters()).device.type != "cpu":
            self.sampler.reset()

    def close(self) -> None:
        """Engines, servers and files of the run are gone."""
        for close in reversed(self.closers):
            with contextlib.suppress(Exception):
                close()
        self.closers.clear()


def make_policy_sampler(
    model: Any, tokenizer: Any, args: GRPOConfig, drawn: Drawn, loop: LoopThread, accelerator: Any, slots: int
) -> PolicySampler:
    """The sampler that the options ask for, ready for its first `publish`.

    Args:
        model: The policy, with its adapter where it has one.
        tokenizer: Or processor.
        args: The trainer's.
        drawn: What `drawn_from(args)` says.
        loop: On which the sampler will be used.
        accelerator: Of the trainer.
        slots: Rollouts at a time.

    Raises:
        ConfigurationError: Something that this engine cannot do.
        ConnectionError: No server became ready in `vllm_server_timeout` seconds.
        MissingDependency: vLLM, or its client, is not installed.
    """
    if args.use_vllm:
        from agentrl.train import vllm_setup

        if args.vllm_mode == "server":
            return vllm_setup.server(model, tokenizer, args, drawn, loop, accelerator, slots)
        return vllm_setup.colocate(model, tokenizer, args, drawn, loop, accelerator, slots)
    return _in_process(model, args, drawn, slots)


# --- the trainer's own model -----------------------------------------------------------
def _in_process(model: Any, args: GRPOConfig, drawn: Drawn, slots: int) -> PolicySampler:
    context, dtype = setup.context_length(model), autocast_dtype(args)
    fp32 = next(setup.bare(model).parameters()).dtype == torch.float32 and dtype is None
    sampler: Any
    if args.use_transformers_continuous_batching:
        from agentrl.sampler.continuous import ContinuousSampler

        config = table(args.transformers_continuous_batching_config, "transformers_continuous_batching_config")
        sampler = ContinuousSampler(
            model, config=config, kwargs=drawn.kwargs, max_context=context, max_slots=slots, autocast_dtype=dtype
        )
    elif drawn.kwargs or args.cache_implementation:
        from agentrl.sampler.generate import GenerateSampler

        sampler = GenerateSampler(
            model, kwargs=drawn.kwargs, cache_implementation=args.cache_implementation, max_context=context,
            max_slots=slots, autocast_dtype=dtype,
        )  # fmt: skip
    else:
        from agentrl.sampler.transformers import TransformersSampler

        sampler = TransformersSampler(model, max_context=context, max_slots=slots, autocast_dtype=dtype)
    exact = fp32 and getattr(sampler, "exact", True) and drawn.params.repetition_penalty == 1.0
    return PolicySampler(sampler, context, exact, model, closers=[sampler.close])


def autocast_dtype(args: GRPOConfig) -> torch.dtype | None:
    """The dtype of mixed precision; None where there is none."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None

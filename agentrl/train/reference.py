"""The reference model of the KL term: the policy as it was, in the policy's own place for one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError
from agentrl.train.setup import bare

if TYPE_CHECKING:
    from agentrl.train.trainer import GRPOTrainer

FILE = "reference.safetensors"  # beside the optimizer's state in a checkpoint


class Reference:
    """The policy at the time this was made, whatever it was: a full model, a fresh adapter, one trained before.

    Held is a copy of the trained parameters only: a full model costs one more copy, an adapter costs an adapter. For a
    pass the copy and the policy change places, so the reference goes the policy's way in everything else (precision,
    packing, options of the forward). With `moves` it does not stay what it was.
    """

    def __init__(self, model: torch.nn.Module, *, moves: bool = False) -> None:
        self._model, self._moves = model, moves
        self._held: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._trained().items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model is the reference, without dropout; nothing may be sampled or trained there.

        Raises:
            ConfigurationError: A parameter is trained that was frozen when the reference was made.
        """
        if missing := self._trained().keys() - self._held.keys():
            raise ConfigurationError(
                f"With beta > 0 the trained parameters are fixed when the trainer is made; '{min(missing)}' was frozen "
                "then. Unfreeze it before, or set beta=0."
            )
        was_training = self._model.training
        self._model.eval()
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self._model.train(was_training)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """The reference is `share` x policy + (1 - `share`) x reference (TR-DPO, arXiv 2404.09656)."""
        for name, parameter in self._model.named_parameters():
            if name in self._held:
                self._held[name].lerp_(parameter.detach(), share)

    def save(self, folder: Path) -> None:
        """The reference is in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: held.contiguous() for name, held in self._held.items()}, folder / FILE)

    def restore(self, folder: Path) -> None:
        """The reference is the one saved in `folder`; where there is none, the model as it was given.

        Raises:
            ConfigurationError: The one saved there belongs to other parameters; or there is none, and it had moved.
        """
        if not (folder / FILE).is_file():
            if self._moves:
                raise ConfigurationError(
                    f"'{folder}' holds no reference model, and with sync_ref_model it cannot be made again: save "
                    "checkpoints with sync_ref_model=True and save_only_model=False, or leave sync_ref_model out."
                )
            return
        saved = load_file(folder / FILE)
        fits = saved.keys() == self._held.keys() and all(saved[n].shape == t.shape for n, t in self._held.items())
        if not fits:
            raise ConfigurationError(f"The reference in '{folder}' is of another model or adapter than the policy.")
        for name, held in self._held.items():
            held.copy_(saved[name])

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def _swap(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._held:
                parameter.data, self._held[name] = self._held[name], parameter.data


class ReferenceCallback(TrainerCallback):
    """Moves the reference every `every` optimizer steps (None: never), and saves it where it cannot be made again."""

    def __init__(self, reference: Reference, share: float, every: int | None, *, saves: bool) -> None:
        self.reference, self.share, self.every, self.saves = reference, share, every, saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every is not None and state.global_step % self.every == 0:
            self.reference.move(self.share)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saves and args.should_save and not args.save_only_model:
            self.reference.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def keep_reference(trainer: GRPOTrainer) -> Reference | None:
    """The trainer's policy as it is now, moved and saved as its options say; None where no KL term needs it."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    if args.beta == 0:
        return None
    reference = Reference(model, moves=args.sync_ref_model)
    every = args.ref_model_sync_steps if args.sync_ref_model else None
    adapter = bare(model) is not model  # may have begun at random
    saves = args.sync_ref_model or adapter
    trainer.add_callback(ReferenceCallback(reference, args.ref_model_mixup_alpha, every, saves=saves))
    return reference

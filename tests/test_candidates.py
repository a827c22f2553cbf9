"""Truncated sampling: what a token was drawn from travels to the loss, and log-probs are of that distribution."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import train_kit as kit

from agentrl.errors import SamplerError
from agentrl.objective import AsyncLossConfig, async_policy_loss
from agentrl.rollout.messages import check_output
from agentrl.rollout.sequences import to_sequences
from agentrl.sampler import ScriptedSampler, TransformersSampler
from agentrl.sampler.draw import MAX_CANDIDATES, candidates, log_probs, most_likely
from agentrl.train.candidates import sampler_heads, sampling_sets
from agentrl.train.head import renormalised
from agentrl.train.log_probs import PLAIN, Wanted, score_tokens
from agentrl.train.rows import make_row
from agentrl.train.step import call
from agentrl.types import SampleOutput, SampleRequest, SamplingParams, TrainingSequence, TurnRecord

TRUNCATED = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}]


# --- in the sampler --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(top_k=2), [[0, 1], [1, 3]]),
        (SamplingParams(top_p=0.75), [[0, 1], [1, 3]]),
        (SamplingParams(min_p=0.6), [[0, 1], [1]]),
        (SamplingParams(top_k=2, temperature=0.0), [[], []]),  # greedy reads no filter
        (SamplingParams(), [[], []]),
    ],
)
def test_the_candidates_are_the_ids_that_could_be_drawn(params: SamplingParams, wanted: list[list[int]]):
    scores = log_probs(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.1, 0.2]]).log(), params)
    assert [list(ids) for ids in candidates(scores)] == wanted
    assert params.truncates == bool(wanted[0])


def test_no_set_is_larger_than_the_bound_and_the_most_likely_stay():
    """Flat rows keep 90% of 2000 ids under top-p, and ties keep all of them under top-k."""
    slope = torch.linspace(0.0, 1e-3, 2000)[None]
    kept = log_probs(slope, SamplingParams(top_p=0.9))
    assert list(candidates(kept)[0]) == list(range(2000 - MAX_CANDIDATES, 2000))
    assert kept.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    equal = log_probs(torch.zeros(1, 2000), SamplingParams(top_k=5))
    assert len(candidates(equal)[0]) == MAX_CANDIDATES
    assert len(candidates(log_probs(slope, SamplingParams(top_k=700)))[0]) == 700  # what is asked for by number
    plain = log_probs(slope, SamplingParams())
    assert torch.isfinite(plain).all()


def request(model: Any, params: SamplingParams, *, tops: int = 0, name: str = "a") -> SampleRequest:
    return SampleRequest([], [], [5, 6, 7], 12, params, (1, 2), name, num_sampler_logprobs=tops)


def test_the_sampler_records_sets_and_most_likely_ids_only_where_asked():
    """Rows with different parameters in one forward; log-probs of top ids are those of the set drawn from."""
    model = kit.policy()

    async def ask() -> list[SampleOutput]:
        sampler = TransformersSampler(model)
        kinds = [(SamplingParams(0.7), 0), (SamplingParams(0.7, top_k=3), 2), (SamplingParams(0.7), 8)]
        asked = [sampler.sample(request(model, p, tops=n, name=str(i))) for i, (p, n) in enumerate(kinds)]
        return list(await asyncio.gather(*asked))

    plain, top, wide = asyncio.run(ask())
    assert plain.sampling_mask is None and plain.sampler_logprobs is None and wide.sampling_mask is None
    assert top.ids and top.log_probs and top.sampling_mask and top.sampler_logprobs and wide.sampler_logprobs
    assert len(top.sampling_mask) == len(top.sampler_logprobs) == len(top.ids)
    ids = torch.tensor([[5, 6, 7, *top.ids]])
    logits = model(input_ids=ids).logits[0, 2:-1].detach() / 0.7
    for t, (token, recorded) in enumerate(zip(top.ids, top.log_probs, strict=True)):
        best = logits[t].topk(3)
        assert set(top.sampling_mask[t]) == set(best.indices.tolist())
        within = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
        assert recorded == pytest.approx(within[token], abs=1e-5)
        assert list(top.sampler_logprobs[t]) == best.indices[:2].tolist()
        assert list(top.sampler_logprobs[t].values()) == pytest.approx(list(within.values())[:2], abs=1e-5)
    assert [len(head) for head in wide.sampler_logprobs] == [8] * len(wide.ids or ())


def test_a_head_has_no_ids_that_cannot_be_drawn():
    scores = log_probs(torch.tensor([[2.0, 1.0, 0.0]]), SamplingParams(top_k=2))
    assert list(most_likely(scores, 8)[0]) == [0, 1]


def test_what_a_sampler_gives_is_checked():
    asked = request(None, SamplingParams(top_k=2), tops=2)
    fine = SampleOutput([4], [-0.1], "stop", sampling_mask=[[4, 5]], sampler_logprobs=[{4: -0.1, 5: -2.3}])
    check_output(fine, asked)
    with pytest.raises(SamplerError, match="2 candidate sets for 1 ids"):
        check_output(SampleOutput([4], [-0.1], "stop", sampling_mask=[[4], [4]]), asked)
    with pytest.raises(SamplerError, match="id 4 at place 0, which is not in its candidate set"):
        check_output(SampleOutput([4], [-0.1], "stop", sampling_mask=[[5, 6]]), asked)
    with pytest.raises(SamplerError, match="this sampler records none"):
        check_output(SampleOutput([4], [-0.1], "stop"), asked)
    with pytest.raises(SamplerError, match="2 sets of most likely tokens for 1 ids"):
        check_output(SampleOutput([4], [-0.1], "stop", sampler_logprobs=[{}, {}]), asked)


# --- on the way ------------------------------------------------------------------------
def test_sets_follow_their_tokens_through_joins_and_forks():
    turns = [
        TurnRecord([1, 2], [3, 4], [-0.5, -0.4], {}, "stop", output_sampling_mask=[[3, 9], []]),
        TurnRecord([1, 2, 3, 4, 7], [5], [-0.1], {}, "stop", output_sampler_logprobs=[{5: -0.1}]),
        TurnRecord([1, 8], [6], [-0.2], {}, "stop", output_sampling_mask=[[6]]),
    ]
    joined, forked = to_sequences(turns)
    assert joined.sampling_mask == [[3, 9], [], ()] and forked.sampling_mask == [[6]]
    assert joined.sampler_logprobs == [{}, {}, {5: -0.1}] and forked.sampler_logprobs is None
    assert sampling_sets([joined, forked]).tolist() == [[3, 9], [-1, -1], [-1, -1], [6, -1]]
    ids, q = sampler_heads([joined, forked])
    assert ids.tolist() == [[-1], [-1], [5], [-1]] and q[2].item() == pytest.approx(-0.1)
    assert sampling_sets([TrainingSequence([1, 2], [False, True], [0.0] * 2)]) is None
    with pytest.raises(ValueError, match="3 sampled ids but 1 candidate sets"):
        to_sequences([TurnRecord([1], [2, 3, 4], [-0.1] * 3, {}, "stop", output_sampling_mask=[[2]])])
    with pytest.raises(ValueError, match="1 trained tokens but 2 sets"):
        sampling_sets([TrainingSequence([1, 2], [False, True], [0.0] * 2, sampling_mask=[[1], [2]])])


# --- in the loss -----------------------------------------------------------------------
def test_gradients_are_those_of_the_renormalised_distribution():
    """p = (0.5, 0.3, 0.2), drawn from {0, 1}: p' = (5/8, 3/8); d log p'_0 = (1 - 5/8, -3/8, 0)."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], dtype=torch.float64).log().requires_grad_()
    sets = torch.tensor([[0, 1], [-1, -1]])
    out = score_tokens(logits, torch.tensor([0, 0]), lambda x: x, 1.0, Wanted(candidates_NK=sets))
    within = renormalised(out.log_probs_N, out.candidates_NK)
    assert within.exp().tolist() == pytest.approx([5 / 8, 1 / 2])
    within.sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([3 / 8, -3 / 8, 0.0], abs=1e-12)
    assert logits.grad[1].tolist() == pytest.approx([0.5, -0.3, -0.2], abs=1e-12)  # no set: the whole vocabulary
    entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
    assert out.entropy_N.tolist() == pytest.approx([entropy] * 2)  # of the whole vocabulary, set or not


def played(folder: Path, sampler: Any = None, **args: Any) -> tuple[Any, Any]:
    """A trainer whose first batch was drawn by the real sampler, and that batch; entropy is moderate."""
    options: dict[str, Any] = {"per_device_train_batch_size": 4, "num_iterations": 2, "temperature": 0.7, **args}
    trainer = kit.make(folder, reward_funcs=kit.length, train_dataset=[{"prompt": "Once"}], args=options)
    if sampler is not None:
        trainer.player.engine.sampler = sampler(trainer.player.sampler)
    trainer.policy_forward.probe()
    return trainer, trainer.buffer.batch(0)


@pytest.mark.parametrize("sampling", TRUNCATED, ids=lambda s: "-".join(s))
def test_an_unchanged_policy_reads_ratio_1_and_not_the_kept_mass(tmp_path: Path, sampling: dict[str, Any]):
    """The real sampler at temperature 0.7, the real forward; recorded log-probs are the old ones."""
    trainer, batch = played(tmp_path, **sampling)
    row = make_row(batch.items, torch.device("cpu"))
    with torch.no_grad():
        now = call(trainer.policy_forward.model, row).log_probs_N
        wide = call(trainer.policy_forward.model, make_row([bare(i) for i in batch.items], now.device)).log_probs_N
    sampler, old = row.gathered("sampler_N"), row.gathered("old_N")
    assert (now - sampler).abs().max() < 1e-5 and torch.equal(old, sampler)
    kept = (wide - sampler).exp()
    assert kept.min() < 0.85 and kept.max() < 1 + 1e-5  # what it would read without the sets
    trainer.close()


def bare(item: Any) -> Any:
    return replace(item, sequences=tuple(replace(s, sampling_mask=None) for s in item.sequences))


class Elsewhere:
    """Another engine than the trainer's own sampler, by its identity; `forget` drops what tokens were drawn from."""

    forget = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def sample(self, asked: SampleRequest) -> SampleOutput:
        out = await self.inner.sample(asked)
        return replace(out, sampling_mask=None) if self.forget else out

    def release(self, conversation_id: str) -> None:
        self.inner.release(conversation_id)


class Forgetful(Elsewhere):
    forget = True


def test_the_correction_of_an_unchanged_policy_is_1_with_sets_and_warned_of_without(tmp_path: Path):
    args = {"top_k": 5, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate"}
    trainer, batch = played(tmp_path, Elsewhere, **args)
    assert all(item.corrected for item in batch.items)
    trainer.step_runner.run(trainer.model, batch, trainer.window["train"])
    logs = trainer.collect("train")
    for name in ("min", "mean", "max"):
        assert logs[f"sampling/importance_sampling_ratio/{name}"] == pytest.approx(1.0, abs=1e-5)
    assert logs["sampling/sampling_logp_difference/max"] < 1e-5
    trainer.close()
    with pytest.warns(UserWarning, match="did not record the candidates"):
        trainer, batch = played(tmp_path, Forgetful, **args)
    trainer.step_runner.run(trainer.model, batch, trainer.window["train"])
    assert trainer.collect("train")["sampling/importance_sampling_ratio/mean"] < 0.95  # the kept mass
    trainer.close()


@pytest.mark.parametrize("sampling", TRUNCATED[:2], ids=lambda s: "-".join(s))
def test_old_and_reference_log_probs_are_of_the_same_sets(tmp_path: Path, sampling: dict[str, Any]):
    """Recomputed old log-probs equal recorded ones, and the KL to an unchanged reference is 0."""
    trainer, batch = played(tmp_path, Elsewhere, beta=0.1, **sampling)
    row = make_row(batch.items, torch.device("cpu"))
    assert (row.gathered("old_N") - row.gathered("sampler_N")).abs().max() < 1e-5
    assert (row.gathered("ref_N") - row.gathered("old_N")).abs().max() < 1e-6
    trainer.close()


def test_a_rollout_functions_sets_reach_the_loss(tmp_path: Path):
    samples = kit.fixed(groups=1)

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        out = samples(prompts, trainer)
        out["sampling_mask"] = [[[token, 3] for token in ids] for ids in out["completion_ids"]]
        return out

    trainer = kit.trainer(kit.policy(), samples, kit.config(tmp_path, per_device_train_batch_size=4, num_iterations=2,
                                                            loss_type="dapo"), rollout_func=generate)  # fmt: skip
    trainer.policy_forward.probe()
    batch = trainer.buffer.batch(0)
    prompt, members = next(iter(samples.table.items()))
    ids = torch.tensor([[*samples.prompt_ids(prompt), *members[0][0]]])
    start = len(samples.prompt_ids(prompt))
    logits = trainer.model(input_ids=ids).logits[0, start - 1 : -1].detach()
    two = torch.stack([logits.gather(-1, ids[0, start:, None])[:, 0], logits[:, 3]], -1)
    assert batch.items[0].old_N.tolist() == pytest.approx(two.log_softmax(-1)[:, 0].tolist(), abs=1e-5)
    trainer.close()


def _check_centred_gradient(trainer: Any, row: Any) -> None:
    """Of the asynchronous loss through the chunked head: that from whole logits, at a policy that has moved."""
    model = trainer.policy_forward.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel()).view_as(parameter).float()))

    def gradient(log_probs_N: torch.Tensor, heads_NH: torch.Tensor) -> torch.Tensor:
        terms = async_policy_loss(
            log_probs_N, row.gathered("sampler_N"), row.per_token([1.0, -1.0, 0.5, 2.0]), row.rollout_N,
            AsyncLossConfig(clip_min=0.8, clip_max=1.25), head_log_probs_TH=heads_NH,
            head_sampler_log_probs_TH=row.head_log_probs_NH,
        )  # fmt: skip
        assert 0 < terms.extras["dropped_T"].sum() < len(log_probs_N)
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(terms.loss_T.sum(), list(model.parameters()))])

    with trainer.policy_forward.context(row):
        out = call(model, row, Wanted(candidates_NK=row.heads_NH))
        got = gradient(out.log_probs_N, out.candidates_NK)
    pieces = torch.split(row.input_ids_T, row.lengths)
    logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids in pieces])[row.scored_by_N]
    inside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, row.sets_NK, torch.ones_like(row.sets_NK) > 0)
    log_p = logits.masked_fill(~inside, -torch.inf).log_softmax(-1)
    want = gradient(log_p.gather(-1, row.targets_N[:, None])[:, 0], log_p.gather(-1, row.heads_NH))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert want.abs().max() > 0.1


# --- for score centering ---------------------------------------------------------------
def test_the_samplers_most_likely_ids_reach_the_rows_with_the_policys_log_probs(tmp_path: Path):
    """With top-k 5 and a head of 3: both are within the set, and an unchanged policy gives the sampler's numbers."""
    trainer = kit.make(tmp_path, reward_funcs=kit.length, train_dataset=[{"prompt": "Once"}],
                       args={"per_device_train_batch_size": 4, "top_k": 5})  # fmt: skip
    engine = trainer.player.engine
    engine.settings = replace(engine.settings, num_sampler_logprobs=3)
    trainer.policy_forward.probe()
    row = make_row(trainer.buffer.batch(0).items, torch.device("cpu"))
    assert row.heads_NH.shape == (len(row.targets_N), 3)
    with torch.no_grad():
        out = call(trainer.policy_forward.model, row, replace(PLAIN, candidates_NK=row.heads_NH))
    assert (out.candidates_NK - row.head_log_probs_NH).abs().max() < 1e-5
    assert (out.log_probs_N - row.gathered("sampler_N")).abs().max() < 1e-5
    _check_centred_gradient(trainer, row)
    engine.sampler = ScriptedSampler([[10, kit.stop()]])
    trainer.buffer._parts.clear()
    with pytest.raises(Exception, match="records none"):
        trainer.buffer.batch(0)
    trainer.close()

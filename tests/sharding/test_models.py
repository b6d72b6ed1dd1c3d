"""Unmodified third-party models under the usual parallel plans: torch's losses, and the expected collectives.

A plan is a spec for each weight by the end of its name, and one for the batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

import gt
from gt.debug import CollectiveEvent, Comm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS, VOCABULARY = 32, 2, 96
SCALARS = 100  # bytes that the scalars of a loss take


def gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=LAYERS, n_head=4, n_embd=HIDDEN, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=64, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=64,
        )
    )  # fmt: skip


class Plan(NamedTuple):
    mesh: tuple[tuple[int, ...], tuple[str, ...]]
    batch: str
    weights: Mapping[str, str] = MappingProxyType({})
    others: str = "-"  # the first dim of every other weight


# Column-parallel weights are cut by their outputs, row-parallel ones by their inputs. GPT-2 keeps them as (in, out).
GPT2_WEIGHTS = {"c_fc.weight": "-, tp", "c_fc.bias": "tp", "mlp.c_proj.weight": "tp, -"}
LLAMA_WEIGHTS = {
    **{f"{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")},
    **{f"{name}_proj.weight": "-, tp" for name in ("o", "down")},
}
MODELS = {"gpt2": (gpt2, GPT2_WEIGHTS), "llama": (llama, LLAMA_WEIGHTS)}


def plans(count: int, weights: dict[str, str]) -> dict[str, Plan]:
    found = {
        "data": Plan(((count,), ("dp",)), "dp, -"),
        "tensor": Plan(((count,), ("tp",)), "-, -", weights),
        "fsdp": Plan(((count,), ("dp",)), "dp, -", others="dp"),
    }
    if count == 4:
        found["hybrid"] = Plan(((2, 2), ("dp", "tp")), "dp, -", weights)
    return found


class Step(NamedTuple):
    loss: float
    forward: Comm
    backward: Comm
    update: Comm


def lay_out(model: torch.nn.Module, plan: Plan) -> gt.DeviceMesh:
    mesh = gt.mesh(*plan.mesh)
    for name, parameter in model.named_parameters():
        usual = ", ".join([plan.others, *["-"] * (parameter.dim() - 1)])
        spec = next((spec for end, spec in plan.weights.items() if name.endswith(end)), usual)
        parameter.data = gt.distribute(parameter.data, mesh, spec)
    for buffer in model.buffers():
        buffer.data = gt.replicate(buffer.data, mesh)
    return mesh


def train(model: torch.nn.Module, batches: list[torch.Tensor]) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches:
        with gt.debug.comm() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with gt.debug.comm() as backward:
            optimizer.zero_grad()
            loss.backward()
        with gt.debug.comm() as update:
            optimizer.step()
        yield Step(loss.item(), forward, backward, update)


def compare(make, plan: Plan, tokens: tuple[int, int]) -> tuple[list[Step], torch.nn.Module]:
    """Train three steps on torch and on GT: same losses and weights, and every byte counted was planned."""
    model = make()
    start = copy.deepcopy(model)
    batches = [torch.randint(0, VOCABULARY, tokens) for _ in range(3)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for ids in batches:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    ours = gt.to(start)
    mesh = lay_out(ours, plan)
    steps = list(train(ours, [gt.distribute(ids, mesh, plan.batch) for ids in batches]))
    assert [step.loss for step in steps] == pytest.approx(expected, abs=1e-5)
    for (name, p), (_, q) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), atol=5e-4, rtol=1e-3, msg=name)
    for comm in [comm for step in steps for comm in step[1:]]:
        assert comm.bytes == sum(event.bytes for event in comm.events)
    return steps, ours


def moving(comm: Comm) -> list[CollectiveEvent]:
    """Collectives among workers that compute together, without broadcasts of constants from another worker."""
    return [event for event in comm.events if event.kind != "broadcast"]


def all_reduces_of(comm: Comm, size: int) -> list[CollectiveEvent]:
    """The all-reduces that move a given number of bytes."""
    return [event for event in comm.events if event.kind == "all-reduce" and event.bytes == size]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", ["data", "tensor", "hybrid", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_torch_on_four_workers(eight_workers, model, plan):
    make, weights = MODELS[model]
    compare(make, plans(4, weights)[plan], (4, 8))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_reduces_once_for_each_parameter(eight_workers, model):
    """At the latest when the optimizer uses the gradient; earlier where less is reduced then (position embeddings)."""
    make, weights = MODELS[model]
    steps, ours = compare(make, plans(4, weights)["data"], (4, 8))
    for step in steps:
        assert sum(event.bytes for event in moving(step.forward)) <= SCALARS
        reduced = [event for event in moving(step.backward) + moving(step.update) if event.bytes > SCALARS]
        assert {event.kind for event in reduced} == {"all-reduce"}
        assert sum(event.tensors for event in reduced) == len(list(ours.parameters()))
        assert len(reduced) <= 2, "all but the position embeddings are reduced together"
        assert sum(event.bytes for event in reduced) <= sum(2 * 3 * p.numel() * 4 for p in ours.parameters())


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("model", "row_parallel", "column_parallel"), [("gpt2", 1, 1), ("llama", 2, 2)])
def test_tensor_parallel_reduces_once_for_each_pair_of_matmuls(eight_workers, model, row_parallel, column_parallel):
    """One all-reduce of an activation for each row-parallel matmul going forward, and one for each group of
    column-parallel ones (that share their input) going backward. Only statistics and vectors move besides."""
    make, weights = MODELS[model]
    steps, _ = compare(make, plans(4, weights)["tensor"], (2, 8))
    activation = 2 * 3 * 16 * HIDDEN * 4
    for step in steps:
        forward, backward = all_reduces_of(step.forward, activation), all_reduces_of(step.backward, activation)
        assert (len(forward), len(backward)) == (row_parallel * LAYERS, column_parallel * LAYERS)
        assert sum(event.bytes for event in moving(step.forward)) - len(forward) * activation <= SCALARS
        assert step.backward.bytes - len(backward) * activation <= activation / 4
        assert step.update.bytes <= activation / 2


def test_fsdp_keeps_weights_and_states_cut(eight_workers):
    make, weights = MODELS["gpt2"]
    steps, ours = compare(make, plans(4, weights)["fsdp"], (4, 8))
    assert all(parameter.spec.dims[0] == ("dp",) for parameter in ours.parameters())
    assert {event.kind for event in steps[-1].update.events} <= {"reduce-scatter", "all-to-all"}

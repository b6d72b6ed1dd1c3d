"""Third-party models, untouched: losses and weights as on plain torch."""

import copy
import warnings

import pytest
import torch

import gt
from tests.conftest import MODES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=100, max_position_embeddings=64,
        )
    )  # fmt: skip


def train(model, batches):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_training_equals_torch(make, mode):
    model = make()
    start = copy.deepcopy(model)
    batches = [torch.randint(0, 100, (4, 16)) for _ in range(5)]
    expected = train(model, batches)
    gt.init(**MODES[mode])
    try:
        ours = gt.to(start)
        found = train(ours, [gt.to(ids) for ids in batches])
        assert found == pytest.approx(expected, abs=1e-5)
        for (name, p), q in zip(model.named_parameters(), ours.named_parameters(), strict=True):
            torch.testing.assert_close(q[1].detach().cpu(), p.detach(), atol=1e-5, rtol=1e-5, msg=name)
        assert ours.lm_head.weight is ours.get_input_embeddings().weight or make is llama
    finally:
        gt.shutdown()


def test_plain_inputs_and_a_model_built_on_the_workers(embedded):
    with gt.device():
        model = gpt2()
    assert all(isinstance(parameter, gt.Tensor) for parameter in model.parameters())
    losses = train(model, [torch.randint(0, 100, (2, 8))] * 3)
    assert losses[2] < losses[0]


def test_generation(embedded):
    model = llama().eval()
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    found = gt.to(copy.deepcopy(model)).generate(gt.to(prompt), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert found.tolist() == expected.tolist()

"""Small models with a training step each, and hand-written layouts of them, for tests and the table of
docs/autoshard.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import gt

GPT2_TENSOR_PARALLEL = {
    "*.c_fc.weight": ["-", "tp"],
    "*.c_fc.bias": ["tp"],
    "*.mlp.c_proj.weight": ["tp", "-"],
}
LLAMA_TENSOR_PARALLEL = {
    "*.[qkv]_proj.weight": ["tp", "-"],
    "*.o_proj.weight": ["-", "tp"],
    "*.gate_proj.weight": ["tp", "-"],
    "*.up_proj.weight": ["tp", "-"],
    "*.down_proj.weight": ["-", "tp"],
}
TENSOR_PARALLEL: dict[str, dict[str, list[Any]]] = {
    "mlp": {"0.weight": ["tp", "-"], "0.bias": ["tp"], "2.weight": ["-", "tp"]},
    "gpt2": GPT2_TENSOR_PARALLEL,
    "llama": LLAMA_TENSOR_PARALLEL,
    "mixtral": {"*.[qkv]_proj.weight": ["tp", "-"], "*.o_proj.weight": ["-", "tp"]},
}


class TrainingStep(NamedTuple):
    model: torch.nn.Module
    step: Callable[..., torch.Tensor]
    args: tuple[torch.Tensor, ...]


def plain_model(name: str, layers: int = 2) -> torch.nn.Module:
    """A small model on this process, with the same weights each time, and without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    if name == "mlp":
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=64, n_head=8, n_positions=64, **sizes, **dropout))
    llama = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
    }
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**llama, **sizes))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
    model = MixtralForCausalLM(MixtralConfig(**llama, **sizes, **experts))
    model.set_experts_implementation("batched_mm")
    return model


def training_step(model: torch.nn.Module, name: str) -> TrainingStep:
    """A step of AdamW. The arguments are plain tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    if name == "mlp":
        args: tuple[torch.Tensor, ...] = (torch.randn(32, 64),)
    else:
        args = (torch.randint(0, 256, (8, 16)),)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean() if name == "mlp" else model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return TrainingStep(model, step, args)


def gt_step(name: str, layers: int = 2) -> TrainingStep:
    return training_step(gt.to(plain_model(name, layers)), name)


def handwritten(name: str, mesh: gt.DeviceMesh) -> dict[str, gt.ModelConfig]:
    """Plans of people: data parallel, Megatron's tensor parallel along one axis, fully sharded, and both on a grid."""
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    everything: list[Any] = [list(mesh.axis_names), "..."]
    return {
        "data parallel": gt.ModelConfig(sizes, inputs=everything),
        "megatron": gt.ModelConfig(sizes, parameters=TENSOR_PARALLEL[name], inputs=["..."]),
        "fsdp": gt.ModelConfig(
            sizes, parameters={"*weight": [list(mesh.axis_names)]}, inputs=everything, outputs={"*": everything}
        ),
        "2-d": gt.ModelConfig(sizes, parameters=TENSOR_PARALLEL[name], inputs=["dp", "..."]),
    }

"""Lists the aten ops in a training step of well-known models, recorded from tiny models with random weights.

python -m tests.sharding.model_ops > gt/sharding/model_ops.txt
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=99, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TEXT, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64)
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, intermediate_size=64))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    )


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **TEXT, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
        )
    )


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> Any:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    return transformers.ResNetForImageClassification(config)


def text() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 99, (2, 16))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


MODELS: dict[Callable[[], Any], Callable[[], dict[str, torch.Tensor]]] = {
    gpt2: text, llama: text, bert: text, t5: text, mixtral: text, vit: images, resnet: images,
}  # fmt: skip


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    for foreach in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            optimizer.step()


def main() -> None:
    users: dict[str, list[str]] = {}
    for make, inputs in MODELS.items():
        model, batch = make().train(), inputs()
        with Ops() as ops, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, batch)
        for op in ops.found:
            users.setdefault(op, []).append(make.__name__)
    for op in sorted(users):
        if op.startswith("aten."):
            print(op, *users[op])


if __name__ == "__main__":
    main()

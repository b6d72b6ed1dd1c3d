"""Programs of other libraries on models that are on GT: adapters, trainers, summaries. Torch is the oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gt

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0,
         "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SMALL))


def on_both(program: Callable[[Callable[[Any], Any]], list[float]]) -> None:
    """Run a program with plain torch and with GT."""
    torch.testing.assert_close(program(gt.to), program(lambda what: what), rtol=1e-3, atol=1e-4)


def test_modules_and_tensors_added_to_a_model_on_gt_are_moved_to_gt(anywhere: str) -> None:
    model = gt.to(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    model.head = torch.nn.Linear(2, 1)
    model.scale = torch.nn.Parameter(torch.ones(2))
    model.register_buffer("mean", torch.zeros(2))
    model.parts = torch.nn.ModuleDict()
    model.parts["later"] = torch.nn.Linear(1, 1)
    assert all(isinstance(value, gt.Tensor) for value in [*model.parameters(), *model.buffers()])
    assert isinstance(model.scale, torch.nn.Parameter)


def test_parts_that_are_tied_stay_tied(embedded: None) -> None:
    model = gt.to(torch.nn.Module())
    shared = torch.nn.Parameter(torch.ones(2))
    model.a, model.b = shared, shared
    assert model.a is model.b


def test_plain_modules_stay_plain(embedded: None) -> None:
    gt.to(torch.nn.Linear(1, 1))
    plain = torch.nn.Sequential()
    plain.append(torch.nn.Linear(1, 1))
    assert not any(isinstance(value, gt.Tensor) for value in plain.parameters())


@pytest.mark.parametrize("kind", ["lora", "ia3"])
def test_adapters_are_moved_to_gt_and_trained_as_in_torch(anywhere: str, kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    config = (
        peft.LoraConfig(r=4, **options) if kind == "lora" else peft.IA3Config(feedforward_modules=[], **options)
    )  # fmt: skip

    def program(to: Callable[[Any], Any]) -> list[float]:
        model = peft.get_peft_model(to(small_model()), config)
        model.add_adapter("second", config)
        assert to is not gt.to or all(isinstance(value, gt.Tensor) for value in model.parameters())
        trained = [value for value in model.parameters() if value.requires_grad]
        with torch.no_grad():
            for value in trained:
                value.copy_(torch.linspace(-0.1, 0.1, value.numel()).view_as(value))
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        ids, losses = torch.arange(16).view(2, 8), []
        for _ in range(3):
            loss = model(input_ids=to(ids), labels=to(ids)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.save_pretrained(tmp_path)
        return losses

    on_both(program)


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"])
def test_prompts_are_moved_to_gt_and_trained_as_in_torch(anywhere: str, kind: str) -> None:
    """The library's own module holds them, beside the model."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(num_virtual_tokens=2, task_type="CAUSAL_LM")

    def program(to: Callable[[Any], Any]) -> list[float]:
        base = to(small_model())
        torch.manual_seed(1)
        model = peft.get_peft_model(base, config)
        assert all(isinstance(value, gt.Tensor) == (to is gt.to) for value in model.parameters())
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=0.01)
        ids, losses = torch.arange(16).view(2, 8), []
        for _ in range(2):
            loss = model(input_ids=to(ids), labels=to(ids)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    on_both(program)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "orthogonal"])
def test_adapters_that_start_from_a_factorisation_of_the_weights(anywhere: str, init: str) -> None:
    """The library assigns GT tensors to `.data` of plain parameters."""
    peft = pytest.importorskip("peft")

    def program(to: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=init)
        model = peft.get_peft_model(to(base), config)
        assert to is not gt.to or all(isinstance(value, gt.Tensor) for value in model.parameters())
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.01)
        x, losses = torch.linspace(-1, 1, 24).view(3, 8), []
        for _ in range(3):
            loss = model(to(x)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    on_both(program)


class Sentences(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index + 1)) % 64
        return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore")
def test_a_default_trainer_saves_checkpoints_and_resumes(anywhere: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")

    def program(to: Callable[[Any], Any]) -> list[float]:
        folder, losses = tmp_path / to.__name__, []
        for steps in (2, 4):  # the second time from the checkpoint of the first
            arguments = TrainingArguments(
                str(folder), max_steps=steps, save_steps=2, logging_steps=1, per_device_train_batch_size=4,
                report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
            )  # fmt: skip
            trainer = Trainer(to(small_model()), arguments, train_dataset=Sentences())
            trainer.train(resume_from_checkpoint=steps > 2)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert (folder / "checkpoint-4" / "model.safetensors").is_file()
        return losses

    on_both(program)


def test_a_summary_of_a_model_has_sizes(embedded: None) -> None:
    torchinfo = pytest.importorskip("torchinfo")
    model, x = torch.nn.Sequential(torch.nn.Linear(300, 400)), torch.ones(2, 300)
    plain = torchinfo.summary(model, input_data=x, verbose=0)
    ours = torchinfo.summary(gt.to(model), input_data=gt.to(x), verbose=0)
    assert str(ours) == str(plain)

"""Saving and loading with other libraries, and the sizes and addresses of storages that these read."""

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import gt
from gt.signals.registry import registry

SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16, "bos_token_id": 0,
         "eos_token_id": 0}  # fmt: skip


def small_model() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SMALL))


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def test_tied_tensors_have_one_storage_and_one_address(embedded: None) -> None:
    x = gt.zeros(4, 3)
    y = x.detach()
    assert x.data_ptr() == y.data_ptr() == x.storage().data_ptr() == x.untyped_storage().data_ptr()
    assert x.untyped_storage() == y.untyped_storage() != gt.zeros(4, 3).untyped_storage()
    assert x[1].untyped_storage() == x.untyped_storage()
    assert x.data_ptr() < x[1].data_ptr() < x[2].data_ptr()
    assert gt.zeros(0).data_ptr() == gt.zeros(0).untyped_storage().data_ptr() == 0


def test_a_storage_has_a_size(embedded: None) -> None:
    x = gt.zeros(4, 3)[1]
    assert (x.untyped_storage().nbytes(), x.storage().size(), len(x.untyped_storage())) == (48, 12, 48)
    assert sys.getsizeof(x.untyped_storage()) >= 48


def test_an_address_cannot_be_used_as_a_pointer(embedded: None) -> None:
    address = gt.zeros(3)[1].data_ptr()
    with pytest.raises(OverflowError):
        address.to_bytes(8, "little")
    with pytest.raises(ValueError, match="NULL pointer"):
        ctypes.cast(address, ctypes.POINTER(ctypes.c_ubyte)).contents


def test_reading_the_bytes_of_a_storage_raises(embedded: None) -> None:
    with pytest.raises(AttributeError, match=r"its bytes are on a worker; use tensor.cpu\(\)"):
        gt.zeros(3).untyped_storage().tolist()


def test_safetensors_write_and_read_tensors(anywhere: str, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.zeros(0, 2), "d": torch.tensor(2.0)}
    safetensors.torch.save_file({name: gt.to(tensor) for name, tensor in tensors.items()}, tmp_path / "f")
    for name, tensor in safetensors.torch.load_file(tmp_path / "f").items():
        assert torch.equal(tensor, tensors[name])
    assert safetensors.torch.save({"a": gt.ones(3)}) == safetensors.torch.save({"a": torch.ones(3)})


def test_safetensors_refuse_tensors_that_share_memory(embedded: None, tmp_path: Path) -> None:
    x = gt.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file({"a": x, "b": x.detach()}, tmp_path / "f")


def test_safetensors_save_and_load_a_model_with_tied_weights(anywhere: str, tmp_path: Path) -> None:
    model = small_model()
    expected = values(model)
    safetensors.torch.save_model(gt.to(model), str(tmp_path / "f"))
    for other in (small_model(), gt.to(small_model())):
        safetensors.torch.load_model(other, str(tmp_path / "f"))
        torch.testing.assert_close(values(other), expected, rtol=0, atol=0)


def test_a_pretrained_model_is_saved(anywhere: str, tmp_path: Path) -> None:
    model = small_model()
    expected = values(model)
    gt.to(model).save_pretrained(tmp_path)
    torch.testing.assert_close(values(GPT2LMHeadModel.from_pretrained(tmp_path)), expected, rtol=0, atol=0)


def loaded(tmp_path: Path, **options: object) -> GPT2LMHeadModel:
    with gt.device():
        return GPT2LMHeadModel.from_pretrained(tmp_path, **options)


def test_a_pretrained_model_is_loaded_onto_gt(anywhere: str, tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    other = loaded(tmp_path)
    assert all(isinstance(value, gt.Tensor) for value in [*other.parameters(), *other.buffers()])
    assert other.lm_head.weight is other.transformer.wte.weight
    torch.testing.assert_close(values(other), values(model), rtol=0, atol=0)


DIFFUSION_PLAN = """
model:
  mesh: {tp: 2}
  "*.conv1.weight": [tp, -, -, -]
"""


def test_a_pretrained_diffusion_model_is_loaded_onto_gt(tmp_path: Path) -> None:
    """Its library makes parameters of their own class, and puts loaded ones into the tables of modules."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    model.save_pretrained(tmp_path)
    (tmp_path / "plan.yaml").write_text(DIFFUSION_PLAN)
    gt.init(workers=2, mode="virtual")
    gt.load_config(tmp_path / "plan.yaml")
    try:
        with gt.device():
            other = diffusers.AutoencoderKL.from_pretrained(tmp_path)
        assert all(isinstance(value, gt.Tensor) for value in [*other.parameters(), *other.buffers()])
        assert all(isinstance(value, torch.nn.Parameter) for value in other.parameters())
        assert str(other.encoder.mid_block.resnets[0].conv1.weight.spec) == "tp, -, -, -"
        assert str(other.encoder.mid_block.resnets[0].conv2.weight.spec) == "-, -, -, -"
        torch.testing.assert_close(values(other), values(model), rtol=0, atol=0)
        x = torch.randn(2, 3, 8, 8)
        torch.testing.assert_close(other(gt.to(x)).sample.cpu(), model(x).sample, rtol=1e-4, atol=1e-4)
    finally:
        registry.clear()
        gt.shutdown()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_class_of_a_parameter_makes_parameters(embedded: None, requires_grad: bool) -> None:
    parameter = torch.nn.Parameter(gt.ones(2))
    for data in (torch.zeros(3), gt.zeros(3)):
        made = type(parameter)(data, **{**parameter.__dict__, "requires_grad": requires_grad})
        assert isinstance(made, gt.Tensor) and isinstance(made, torch.nn.Parameter)
        assert (made.tolist(), made.requires_grad) == ([0.0] * 3, requires_grad)
    empty = type(parameter)(parameter.to("meta"), requires_grad=requires_grad)
    assert type(empty) is torch.nn.Parameter and empty.is_meta
    assert type(parameter)([1.0, 2.0]).tolist() == [1.0, 2.0]


def test_weights_that_a_file_lacks_are_made_on_gt(embedded: None, tmp_path: Path) -> None:
    small_model().transformer.save_pretrained(tmp_path)
    with gt.device():
        model = GPT2ForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert isinstance(model.score.weight, gt.Tensor)
    assert model.score.weight.isfinite().all()


PLAN = """
model:
  mesh: {tp: 2}
  "transformer.h.*.mlp.c_fc.weight": [-, tp]
  "transformer.wte.weight": [tp, -]
"""


def test_a_pretrained_model_is_loaded_as_the_configuration_lays_it_out(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    gt.init(workers=2, mode="virtual")
    gt.load_config(tmp_path / "plan.yaml")
    try:
        model = loaded(tmp_path)
        block = model.transformer.h[1]
        assert str(block.mlp.c_fc.weight.spec) == "-, tp"
        assert str(block.mlp.c_proj.weight.spec) == "-, -"
        assert str(model.lm_head.weight.spec) == "tp, -"
    finally:
        registry.clear()
        gt.shutdown()


def test_a_pretrained_model_is_never_whole_in_the_client(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(**{**SMALL, "n_layer": 12, "n_embd": 64})).save_pretrained(tmp_path)
    gt.init(workers=2)
    for dtype in (torch.float32, torch.bfloat16):  # as it is in the file, and converted
        alive = [plain_bytes()]
        handle = register_module_parameter_registration_hook(lambda *_, alive=alive: alive.append(plain_bytes()))
        try:
            model = loaded(tmp_path, dtype=dtype)
        finally:
            handle.remove()
        sizes = [parameter.nbytes for parameter in model.parameters()]
        assert len(alive) > len(sizes)
        assert max(alive) - alive[0] <= 3 * max(sizes) < sum(sizes) / 8
    gt.shutdown()


def plain_bytes() -> int:
    """The bytes of all tensors of this process."""
    plain = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    return sum(value.nbytes for value in plain if value.device.type == "cpu")

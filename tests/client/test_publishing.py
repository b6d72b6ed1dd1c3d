"""A program that subscribes to what it has published: a snapshot, which cannot be written."""

import pytest
import torch

import gt


@pytest.fixture
def weights(anywhere):
    torch.manual_seed(0)
    x = gt.randn(4, 6)
    gt.publish("weights", x)
    return x


def test_a_subscriber_has_the_value_and_the_layout(weights):
    x = gt.subscribe("weights")
    assert torch.equal(x.cpu(), weights.cpu()) and x.spec == weights.spec
    assert torch.equal((x @ x.t()).cpu(), weights.cpu() @ weights.cpu().t())


def test_later_writes_of_the_publisher_are_not_seen(weights):
    before, x = weights.cpu(), gt.subscribe("weights")
    weights += 1
    weights[0].zero_()
    late = gt.subscribe("weights")
    assert torch.equal(x.cpu(), before) and torch.equal(late.cpu(), before)
    gt.publish("weights", weights)
    assert torch.equal(gt.subscribe("weights").cpu(), weights.cpu()) and torch.equal(x.cpu(), before)


WRITES = {
    "method": lambda x: x.add_(1),
    "row": lambda x: x[0].zero_(),
    "item": lambda x: x.__setitem__((0, 0), 5),
    "transposed": lambda x: x.t().mul_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "out view": lambda x: torch.add(x[0], 1, out=x[1]),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "copy": lambda x: x.copy_(torch.zeros(4, 6)),
    "random": lambda x: x.normal_(),
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().fill_(1),
    "masked": lambda x: x.masked_fill_(x > 0, 0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_raises_on_its_line(weights, write):
    before, x = weights.cpu(), gt.subscribe("weights")
    with pytest.raises(gt.ReadOnlyError, match="'weights'\\), which another session has published"):
        write(x)
    assert torch.equal(x.cpu(), before) and torch.equal(weights.cpu(), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_flow_and_optimizers_cannot_write(weights, optimizer):
    before, x = weights.cpu(), gt.subscribe("weights").requires_grad_()
    (x * x).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 2 * before)
    with pytest.raises(gt.ReadOnlyError):
        optimizer([x], 0.1).step()
    assert torch.equal(x.detach().cpu(), before)


def test_a_compiled_function_cannot_write_either(weights):
    x = gt.subscribe("weights")

    @gt.compile
    def write(y):
        y.add_(1)
        return y * 2

    with pytest.raises(gt.ReadOnlyError):
        for _ in range(3):
            write(x)
    assert torch.equal(x.cpu(), weights.cpu())


def test_a_copy_can_be_written(weights):
    x = gt.subscribe("weights").clone()
    x += 1
    assert torch.equal(x.cpu(), weights.cpu() + 1)


def test_training_goes_on_after_publishing(anywhere):
    torch.manual_seed(0)
    model = gt.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    snapshots = []
    for _ in range(12):  # long enough for segments
        optimizer.zero_grad()
        model(gt.ones(8, 4)).pow(2).sum().backward()
        optimizer.step()
        gt.publish("weight", model.weight)
        snapshots.append((gt.subscribe("weight"), model.weight.detach().cpu()))
    for published, then in snapshots:
        assert torch.equal(published.cpu(), then)
    assert not torch.equal(snapshots[0][1], snapshots[-1][1])


def test_views_plain_tensors_and_partial_sums_can_be_published(anywhere):
    x = gt.arange(12.0).reshape(3, 4)
    for value in (x[1:], x.t(), torch.ones(2), gt.ones(4, 4).sum(0)):
        gt.publish("value", value)
        assert torch.equal(gt.subscribe("value").cpu(), torch.as_tensor(value.tolist()))


def test_a_tensor_that_has_failed_cannot_be_published(anywhere):
    row = gt.arange(3.0)[gt.tensor([7])]
    with pytest.raises(gt.OpError, match="out of bounds"):
        gt.publish("row", row)


def test_an_unknown_name_says_which_there_are(weights):
    with pytest.raises(gt.PublishError, match="'weight' is not published for this session; did you mean 'weights'"):
        gt.subscribe("weight")
    gt.unpublish("weights")
    with pytest.raises(gt.PublishError, match="nothing is published"):
        gt.subscribe("weights", timeout=0.1)
    with pytest.raises(gt.PublishError):
        gt.unpublish("weights")


@pytest.mark.parametrize("name", ["", 3, "x" * 257])
def test_what_cannot_be_a_name(anywhere, name):
    with pytest.raises(gt.SettingsError, match="cannot be the name"):
        gt.publish(name, gt.ones(2))


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\ud800", "x" * 257, 3, None])
def test_a_name_that_no_message_can_hold_is_refused_and_the_session_goes_on(anywhere, name):
    uses = (lambda: gt.publish(name, gt.ones(2)), lambda: gt.subscribe(name), lambda: gt.unpublish(name))
    for use in uses:
        with pytest.raises(gt.SettingsError, match="cannot be the name of a published tensor"):
            use()
    with pytest.raises(gt.SettingsError, match="names of keys"):
        gt.publish("weights", gt.ones(2), to=[name])
    assert gt.ones(2).sum().item() == 2


@pytest.mark.parametrize("to", [3, None, ["team"] * 5000])
def test_keys_that_cannot_be_are_refused(anywhere, to):
    with pytest.raises(gt.SettingsError, match="names of keys"):
        gt.publish("weights", gt.ones(2), to=to)


def test_only_tensors_are_published(anywhere):
    with pytest.raises(gt.SettingsError, match="takes a tensor, not int"):
        gt.publish("weights", 3)


@pytest.mark.parametrize("timeout", [float("nan"), "10", None])
def test_a_timeout_that_is_no_number_is_refused(anywhere, timeout):
    with pytest.raises(gt.SettingsError, match="takes a number of seconds"):
        gt.subscribe("nobody", timeout=timeout)

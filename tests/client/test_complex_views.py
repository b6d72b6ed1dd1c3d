"""Views of complex tensors: their real and imaginary parts, conjugated and transposed, read, written and restrided."""

import pytest
import torch

import gt

WRITES = {
    "imaginary parts": lambda z: z.imag.add_(1),
    "real parts": lambda z: torch.view_as_real(z)[..., 0].add_(3),
    "imaginary parts of the conjugate": lambda z: z.conj().imag.add_(1),
    "real parts of the conjugate": lambda z: z.conj().real.mul_(2),
    "some of the conjugate": lambda z: z.conj().imag[1:].copy_(torch.tensor([[5.0, 6.0]])),
    "the adjoint": lambda z: z.mH.imag[0].fill_(7),
    "a row": lambda z: z.conj()[0].imag.neg_(),
    "all of the conjugate": lambda z: z.t().conj().mul_(2j),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_parts_are_written_as_in_torch(anywhere, write, dtype):
    plain = torch.tensor([[1 + 2j, 3 + 4j], [5 - 1j, 2 + 0j]], dtype=dtype)
    ours = gt.to(plain)
    WRITES[write](plain)
    WRITES[write](ours)
    assert ours.tolist() == plain.tolist()


LAZY = {
    "conj": lambda z: z.conj(),
    "conj twice": lambda z: z.conj().conj(),
    "adjoint": lambda z: z.mH,
    "row of a conj": lambda z: z.conj()[0],
    "part of a conj": lambda z: z.conj().chunk(2)[1],
    "detached conj": lambda z: z.conj().detach(),
    "data of a conj": lambda z: z.conj().data,
    "restrided conj": lambda z: z.conj().as_strided((3,), (1,), 1),
    "imaginary parts of a conj": lambda z: z.conj().imag,
    "restrided imaginary parts of a conj": lambda z: z.conj().imag.as_strided((2, 2), (1, 2), 3),
    "negated view": lambda z: torch._neg_view(z),
    "resolved conj": lambda z: z.conj().resolve_conj(),
    "resolved imaginary parts": lambda z: z.conj().imag.resolve_neg(),
    "conj plus one": lambda z: z.conj() + 1,
    "copied conj": lambda z: z.conj().clone(),
    "product of a conj": lambda z: z.conj() @ z.mH,
    "joined conj": lambda z: torch.cat([z.conj(), z]),
    "conj written to": lambda z: z.conj().mul_(2j),
}


@pytest.mark.parametrize("view", LAZY)
def test_lazy_views_are_known_as_such(anywhere, view):
    plain = torch.tensor([[1 + 2j, 3 + 4j], [5 - 1j, 2 + 0j]])
    expected, found = LAZY[view](plain), LAZY[view](gt.to(plain.clone()))
    assert (found.is_conj(), found.is_neg()) == (expected.is_conj(), expected.is_neg())
    assert torch.is_conj(found) == expected.is_conj()


@pytest.mark.parametrize("view", LAZY)
def test_lazy_views_have_torchs_values(anywhere, view):
    z = torch.tensor([[1 + 2j, 3 + 4j], [5 - 1j, 2 + 0j]])
    ours = gt.to(z)
    assert LAZY[view](ours).tolist() == LAZY[view](z).tolist()
    assert ours.tolist() == z.tolist()


def test_parts_of_a_lazy_conjugate_are_refused_as_in_torch(anywhere):
    with pytest.raises(RuntimeError, match="view_as_real doesn't work on unresolved conjugated tensors"):
        torch.view_as_real(gt.ones(2, dtype=torch.complex64).conj())


def _sliced(tensor, times):
    for _ in range(times):
        tensor = tensor[1:]
    return tensor


# Views that are given by their offset in a storage of another dtype, or of conjugated numbers: as_strided, and paths
# that are too long to be kept step by step.
RESTRIDED = {
    "real and imaginary parts": lambda z: torch.view_as_real(z).as_strided((2, 2), (1, 2), 20),
    "imaginary parts": lambda z: z.imag.as_strided((2, 2), (1, 2), 2),
    "pairs of floats": lambda z: torch.view_as_complex(torch.view_as_real(z).clone()).as_strided((2, 3), (3, 1), 2),
    "integers": lambda z: _sliced(torch.view_as_real(z).clone().flatten()[:25].view(torch.int32), 12),
    "a long path from a conj": lambda z: _sliced(z.conj().flatten(), 10),
    "a long path from an imaginary part": lambda z: _sliced(z.conj().imag.t().t()[1:].t().t(), 2),
    "restrided in place": lambda z: torch.Tensor.as_strided_(z.conj()[1:], (2, 3), (2, 1), 4),
    "resized": lambda z: z.conj().resize_(2, 2),
}


@pytest.mark.parametrize("name", RESTRIDED)
def test_restrided_views_of_complex_tensors(anywhere, name):
    plain = torch.complex(torch.arange(12.0), torch.arange(12.0) ** 2).view(4, 3)
    ours = gt.to(plain)
    assert RESTRIDED[name](ours).tolist() == RESTRIDED[name](plain).tolist()
    RESTRIDED[name](ours).add_(1)
    RESTRIDED[name](plain).add_(1)
    assert ours.tolist() == plain.tolist()

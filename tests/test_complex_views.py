"""Writes to the real and imaginary parts of complex tensors, through conjugated and transposed views."""

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

"""Tells the dispatcher which tensor is the gradient of which parameter, so that gradients are reduced together."""

from __future__ import annotations

from gt.client.storage import TensorRef
from gt.client.torch_patches.autograd_nodes import accumulated_parameter, current_node
from gt.core.messages import NoteGradient


def note_gradient(ref: TensorRef) -> None:
    """Called for each `detach`: autograd detaches a gradient before it makes it the `.grad` of a parameter. Does
    nothing for any other tensor, and with one worker."""
    node = current_node()
    if node is None or ref.session.alone:
        return
    parameter = getattr(accumulated_parameter(node), "_ref", None)
    if parameter is not None and parameter.session is ref.session:
        site, is_transposed = ref.session.sites.current(), _is_transposed(ref)
        ref.session.outbox.submit(lambda ids: NoteGradient(ids[0], ids[1], site, is_transposed), (ref, parameter))


def _is_transposed(ref: TensorRef) -> bool:
    """Whether a tensor is a view of its storage with all dims in reverse order."""
    view, whole = ref.geometry, ref.storage.geometry
    return view is not whole and (view.shape, view.stride) == (whole.shape[::-1], whole.stride[::-1])

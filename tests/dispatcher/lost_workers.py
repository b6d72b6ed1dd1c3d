"""Helpers of tests that lose workers."""

from tests.dispatcher_harness import harness_with, told


def lost(outgoing):
    """Messages as text, without those that make workers forget programs and those that tell them of the loss."""
    return [text for text in told(outgoing) if "forget" not in text and "WorkerLosePeer" not in text]


def without_workers():
    harness = harness_with(2)
    harness.lose(1)
    harness.lose(0)
    return harness

"""Kernels of composite ops that GT overrides for the whole process: plain tensors get torch's results."""

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import gt


def test_padded_sequences_of_plain_and_gt_tensors(embedded):
    plain = torch.arange(12.0).reshape(3, 2, 2)
    for tensor in (plain, gt.to(plain)):
        packed = pack_padded_sequence(tensor, [3, 2], enforce_sorted=True)
        padded, lengths = pad_packed_sequence(packed)
        assert (padded.tolist(), lengths.tolist()) == (
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [0, 0]]],
            [3, 2],
        ), "recurrent layers would read the memory of GT tensors, which is elsewhere"

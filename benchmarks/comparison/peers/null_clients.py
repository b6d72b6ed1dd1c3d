"""Many clients in one process. Each sends batches of small ops that were encoded before, on a tensor that is cut over
all workers, and waits for the end of all.

    python -m benchmarks.comparison.peers.null_clients ENDPOINT CLIENTS WORKERS OPS OPS_OF_A_SEGMENT
"""

from __future__ import annotations

import os
import sys
from typing import Any

import zmq

from gt.core.messages import (
    ByteRange,
    CreateTensor,
    DefineOp,
    DefineProgram,
    FreeTensors,
    Hello,
    Redistribute,
    Refused,
    Rejected,
    RunOp,
    RunProgram,
    Synchronize,
    Synchronized,
    Waiting,
    Welcome,
)
from gt.core.meta import TensorMeta, contiguous_strides
from gt.core.signatures import Input, Signature
from gt.sharding.spec import DeviceMesh, ShardingSpec
from gt.version import __version__
from gt.wire.codec import Decoder, Frame, encode
from gt.wire.file_descriptors import raise_open_files_limit
from gt.wire.process_identity import this_host
from gt.wire.sockets import open_socket, receive, send

WAIT_MS = 60_000
BATCH = 200  # ops in a message, at most; the tensors that they make are freed together in the same message
IDS_OF_A_SESSION = 40  # bits
ANSWERS: Decoder[Any] = Decoder(Welcome | Waiting | Refused | Rejected | Synchronized)


class Client:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, workers: int, segment: int) -> None:
        self._socket = open_socket(context, zmq.DEALER, WAIT_MS)
        self._socket.connect(endpoint)
        self._send([Hello(__version__, "client", this_host(), os.getpid(), wants_workers=workers)])
        self._base = self._wait_for(Welcome).ident << IDS_OF_A_SESSION
        self._last = self._base + 100
        self._prepared: list[list[Frame]] = []
        self._segment = segment
        self._define(workers)

    def _define(self, workers: int) -> None:
        """A product of two tensors of numbers, element by element, each cut by its rows over all workers."""
        shape = (max(64, workers), 64)
        meta = TensorMeta(shape, contiguous_strides(shape), 0, "float32")
        multiply = Signature("aten.mul.Tensor", (Input(0), Input(1)), {}, ((), ()), (), (meta,), (0,))
        layout = ShardingSpec(DeviceMesh([workers], ["all"], range(workers)), (("all",), ()))
        setup: list[object] = [DefineOp(self._base + 1, multiply)]
        for place in range(2):
            whole, cut = self._base + 10 + place, self._base + 20 + place
            setup.append(CreateTensor(whole, meta, ByteRange("", meta.nbytes), None, 0))
            setup.append(Redistribute(whole, cut, layout.record(), 0))
        content = bytes(meta.nbytes)
        if self._segment > 1:
            setup.append(self._definition())
        send(self._socket, encode(setup, [[content], [content]]))
        self.prepare(self._segment)
        self.start()
        self.finish()

    def _definition(self) -> DefineProgram:
        """A program of products of the two tensors."""
        ops = [RunOp(self._base + 1, (0, 1), (slot,), (), 0, 0) for slot in range(2, 2 + self._segment)]
        return DefineProgram(self._base + 2, 2, 0, tuple(ops))

    def _ops(self, outputs: tuple[int, ...], inputs: tuple[int, int]) -> list[object]:
        if self._segment == 1:
            batch = [RunOp(self._base + 1, inputs, (output,), (), 0, 0) for output in outputs]
            return [*batch, FreeTensors(outputs)]
        dead = tuple(range(2, 2 + self._segment))
        return [RunProgram(self._base + 2, first, inputs, (), dead) for first in outputs[:: self._segment]]

    def prepare(self, ops: int) -> int:
        """Encode batches, and a question whose answer comes when all are done. Returns their number of ops."""
        size, inputs = min(ops // self._segment * self._segment, BATCH), (self._base + 20, self._base + 21)
        batches = ops // size
        for _ in range(batches):
            outputs = tuple(range(self._last + 1, self._last + 1 + size))
            self._last = outputs[-1]
            self._prepared.append(encode(self._ops(outputs, inputs)))
        self._last += 1
        self._prepared.append(encode([Synchronize(self._last)]))
        return batches * size

    def start(self) -> None:
        for frames in self._prepared:
            send(self._socket, frames)
        self._prepared.clear()

    def finish(self) -> None:
        self._wait_for(Synchronized)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _send(self, records: list[object]) -> None:
        send(self._socket, encode(records))

    def _wait_for(self, kind: type) -> Any:
        while (frames := receive(self._socket)) is not None:
            for answer in ANSWERS.decode(frames)[0]:
                if isinstance(answer, kind):
                    return answer
                if not isinstance(answer, Waiting):
                    raise RuntimeError(f"expected {kind.__name__}, got {answer}")
        raise TimeoutError(f"no {kind.__name__} came in {WAIT_MS / 1000:g} s")


def main() -> None:
    endpoint, count, workers, ops, segment = sys.argv[1], *map(int, sys.argv[2:])
    raise_open_files_limit()
    context = zmq.Context()
    clients = [Client(context, endpoint, workers, segment) for _ in range(count)]
    while True:
        total = sum(client.prepare(ops // count) for client in clients)
        print("ready", flush=True)
        if not sys.stdin.readline():
            break
        for client in clients:
            client.start()
        for client in clients:
            client.finish()
        print(total, flush=True)
    for client in clients:
        client.close()
    context.term()


if __name__ == "__main__":
    main()

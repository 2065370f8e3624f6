"""A bucket with gradients from several streams and several autograd threads, as on one and on
several GPUs, simulated on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.layout.layout import Bucket, Piece
from fusion_passes.reducer.communication import AllReduce, Wait
from fusion_passes.reducer.iteration import Iteration
from fusion_passes.reducer.reducer import Reducer, reducer_of
from testing.threads import run_at_once

pytestmark = pytest.mark.usefixtures("fused_rank")

X = torch.ones(2, 4)


class Layer(nn.Linear):
    """Dynamo does not compile a class of torch's by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Stream:
    """A stream that records which events it has waited for."""

    def __init__(self) -> None:
        self.past: set[object] = set()

    def wait_stream(self, other: Stream) -> None:
        self.past |= other.past


class Streams:
    """Makes each call that passes gradients to a reducer run on another stream than the one before,
    and each launch check what its stream has waited for."""

    def __init__(self, reducer: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all = [Stream(), Stream(), Stream()]
        self.stored: set[object] = set()
        self.launched: list[bool] = []
        self.recorded: set[int] = set()
        self.given_back: list[bool] = []
        self.sent: set[object] = set()
        reducer.memory._accelerators = [torch.device("cpu")]
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: self.all[0])
        monkeypatch.setattr(Tensor, "record_stream", self._record())
        monkeypatch.setattr(Iteration, "mark_stored", self._on_another(Iteration.mark_stored))
        monkeypatch.setattr(Reducer, "accumulated", self._on_another(Reducer.accumulated))
        monkeypatch.setattr(reducer.queue.communication, "launch", self._launch)
        monkeypatch.setattr(Reducer, "finalize", self._on_another(Reducer.finalize))
        monkeypatch.setattr(reducer.memory, "give_back", self._give_back)

    def _on_another(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def on_another(*args: Any, **kwargs: Any) -> Any:
            self.all.append(self.all.pop(0))
            if call is not Reducer.finalize:
                event = object()
                self.all[0].past.add(event)
                self.stored.add(event)
            return call(*args, **kwargs)

        return on_another

    def _record(self) -> Callable[[Tensor, Stream], None]:
        def record(memory: Tensor, stream: Stream) -> None:
            assert stream is self.all[0]
            self.recorded.add(memory.data_ptr())

        return record

    def _launch(self, bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        self.launched.append(self.all[0].past >= self.stored)
        self.sent = set(self.stored)
        return AllReduce.launch(self.communication, bucket, memory, name)

    def _give_back(self, *_: Any) -> None:
        self.given_back.append(self.all[0].past >= self.sent)

    communication = AllReduce(None, "gloo")


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_launch_waits_for_the_streams_of_all_gradients(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    ddp = DistributedDataParallel(nn.Sequential(Layer(4, 4), Layer(4, 4)))
    ddp(X).sum().backward()
    if is_compiled:  # Two graphs, each of which stores a part of the bucket.
        for layer in ddp.module:
            layer.compile()
    ddp.zero_grad()
    ddp(X).sum().backward()
    reducer = reducer_of(ddp)
    assert reducer.record.num_stored == (4 if is_compiled else 0)
    want = [parameter.grad.clone() for parameter in ddp.parameters()]
    Streams.communication = reducer.queue.communication  # type: ignore[assignment]
    streams = Streams(reducer, monkeypatch)
    ddp.zero_grad()
    ddp(X).sum().backward()
    assert streams.launched == [True]
    assert streams.given_back == [True], "the callback's stream has waited for all of them"
    assert streams.recorded
    gradients = [parameter.grad for parameter in ddp.parameters()]
    torch.testing.assert_close(gradients, want, rtol=0, atol=0)


def test_on_a_single_stream_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = DistributedDataParallel(nn.Sequential(Layer(4, 4), Layer(4, 4)))
    reducer_of(ddp).memory._accelerators = [torch.device("cpu")]
    stream = mock.Mock()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    for _ in range(2):
        ddp(X).sum().backward()
    stream.wait_stream.assert_not_called()


def test_threads_launch_each_bucket_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of two GPUs are produced in two autograd threads."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    for _ in range(2):
        ddp.zero_grad()
        ddp(X).sum().backward()
    reducer, launched = reducer_of(ddp), []

    def launch(bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        del memory, name
        launched.append(bucket.index)
        time.sleep(0.05)  # Another thread holds the GIL meanwhile.
        return lambda: None

    monkeypatch.setattr(reducer.queue.communication, "launch", launch)
    ddp(X)
    reducer.backward = object()
    reducer.begin_backward(dict.fromkeys(reducer.parameters.numbers, ""))
    order = tuple(n for bucket in reducer.assignment.layout.buckets for n in bucket.numbers)

    def bring(numbers: Piece) -> Callable[[], None]:
        def bring_all() -> None:
            for number in numbers:
                reducer.accumulated(number)

        return bring_all

    run_at_once([bring(order[:2]), bring(order[2:])])
    assert launched == [0, 1, 2, 3]

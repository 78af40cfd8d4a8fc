"""A bucket on a GPU, as the servers get it: without a GPU its CUDA handle is a stand-in, the rest is as it is sent."""

from __future__ import annotations

import base64
import inspect
import io
import pickle
from types import SimpleNamespace

import torch
from megatron_rl_plugin import memory
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.sync.tensor import DEVICE_ARGUMENT, TensorTransport
from megatron_rl.sync.transport import fill_buckets


def rebuilt(*arguments):
    """In the place of torch's rebuild_cuda_tensor."""
    return arguments


class Unpickler(pickle.Unpickler):
    """The engine's, but for the plugin, which would copy what is no tensor here."""

    def find_class(self, module, name):
        return (
            (lambda bucket: bucket)
            if (module, name) == (memory.MODULE, "own_copy")
            else super().find_class(module, name)
        )


def test_each_rank_maps_the_bucket_into_its_own_gpu(monkeypatch):
    """Whatever number the trainer's GPU has there: a server sees its own GPUs alone."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE_ARGUMENT] == "storage_device"
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (rebuilt, tuple(names)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sent = []
    engines = SimpleNamespace(addresses=["a", "b"], call=lambda path, bodies: sent.append((path, bodies)))
    transport = TensorTransport(engines, 2)
    buffer = torch.empty(64, dtype=torch.uint8)
    [(bucket, _)] = fill_buckets(
        [[("w", torch.ones(4))]],
        capacity=64,
        dtype_of=lambda name: torch.float32,
        buffer_of=lambda nbytes: buffer,
        seen=lambda name, tensor: None,
    )
    monkeypatch.setattr(transport, "_dump_cpu", transport._dump_cuda)
    transport.send(bucket, "1")
    [(path, bodies)] = sent
    assert path == "/update_weights_from_tensor" and len(bodies) == 2
    for body in bodies:
        payloads = [Unpickler(io.BytesIO(base64.b64decode(text))).load() for text in body["serialized_named_tensors"]]
        for rank, payload in enumerate(payloads):
            expected = [*names[:DEVICE_ARGUMENT], rank, *names[DEVICE_ARGUMENT + 1 :]]
            assert list(payload["flattened_tensor"]) == expected
            assert [entry.name for entry in payload["metadata"]] == ["w"]
        assert len(payloads) == 2


def test_a_copy_of_the_trainers_memory_is_waited_for(monkeypatch):
    """On the stream that makes it, and before anybody is told that the memory was read."""
    calls = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.extend([str(func)] * (func.namespace == "aten"))
            return func(*args, **(kwargs or {}))

    stream_of = lambda device: SimpleNamespace(synchronize=lambda: calls.append(f"wait {device}"))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    with FakeTensorMode():
        data = torch.empty(8, dtype=torch.uint8, device="cuda:0")
        with Recorded():
            copied = memory.own_copy({"flattened_tensor": data, "metadata": ["as it was"]})
            calls.append("returned")
    assert calls == ["aten.clone.default", "wait cuda:0", "returned"]
    assert copied["metadata"] == ["as it was"] and copied["flattened_tensor"].is_cuda

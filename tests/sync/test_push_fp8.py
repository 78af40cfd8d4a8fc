"""FP8 pushes to real SGLang servers: rounded weights to one that serves bf16, blocks with scales to one that holds FP8."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from push_on_ranks import random_weights
from test_push import PROMPT, bytes_of, generate, reference_log_probs, tamper

from megatron_rl.config import ServerConfig, SyncConfig
from megatron_rl.models import fp8
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.transport import Bucket, WeightSyncError
from megatron_rl.sync.weight_sync import WeightSync

PLUGIN = Path(__file__).parent / "fp8_plugin"


@contextmanager
def serving(model: Path, folder: Path, dtype: str, *extra: str) -> Iterator[RolloutServer]:
    server = ServerConfig(threads=1, max_total_tokens=2048, memory_fraction=0.2, extra_args=list(extra))
    with RolloutServer(
        model,
        server,
        dtype=dtype,
        context_length=512,
        log_path=folder / "sglang.log",
    ) as running:
        yield running


def test_rounded_weights_are_served(tiny_model, tmp_path):
    """Without a GPU: the engine's log-probs are those of weights rounded to FP8 and back; the checksums say so too."""
    model = tiny_model("qwen3_moe", "--layers", "2", "--experts", "4", "--vocab", "300")
    weights = random_weights(model, seed=7)
    with (
        serving(model, tmp_path, "fp8") as server,
        WeightSync(
            SyncConfig(bucket_mb=0.05, timeout_s=60.0), [server.address], key=server.key, rollout_dtype="fp8"
        ) as sync,
    ):
        stats = sync.push(iter(weights.items()), version="rounded")
        assert stats.bytes == sum(2 * tensor.numel() for tensor in weights.values())
        reply = generate(server, 400)["meta_info"]
    log_probs, ids = zip(*[(entry[0], entry[1]) for entry in reply["output_token_logprobs"]], strict=True)
    rounded = {name: tensor.float() for name, tensor in fp8.quantized(weights.items(), simulate=True)}
    tokens = PROMPT + list(ids)
    near, far = (
        (torch.tensor(log_probs) - reference_log_probs(model, w, tokens, tmp_path / name)[len(PROMPT) - 1 :])
        .abs()
        .median()
        for name, w in (("rounded", rounded), ("plain", weights))
    )
    # bf16 rounds to 2^-9 and e4m3 to 2^-4, so that one is some ten times the other; medians of 400 are right to a tenth.
    assert near < 0.01 and far > 2 * near, (near, far)


def test_blocks_and_scales_land_where_sglang_holds_them(tiny_model, tmp_path, monkeypatch):
    """What a GPU gets, in SGLang's own FP8 layers: every byte of e4m3 and of the scales is where it belongs, twice; a
    scale, or a weight, that was changed on the way is named."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN), prepend=os.pathsep)
    sizes = {"hidden": 128, "heads": 4, "kv-heads": 4, "head-dim": 32, "expert-intermediate": 256, "vocab": 300}
    model = tiny_model("qwen3_moe", "--layers", "2", *[str(part) for k, v in sizes.items() for part in (f"--{k}", v)])
    override = json.dumps({"quantization_config": fp8.quantization_config()})
    flags = ("--load-format", "dummy", "--json-model-override-args", override)
    with (
        serving(model, tmp_path, "bf16", *flags) as server,
        WeightSync(
            SyncConfig(bucket_mb=0.2, timeout_s=60.0), [server.address], key=server.key, rollout_dtype="fp8"
        ) as sync,
    ):
        with pytest.raises(WeightSyncError, match="serves float8_e4m3fn weights, but precision.rollout is bfloat16"):
            sync.connect()
        sync.rollout_dtype, sync._as_served = torch.float8_e4m3fn, fp8.quantized  # as on a GPU
        for push in range(2):
            weights = random_weights(model, seed=push)
            stats = sync.push(iter(weights.items()), version=str(push))
            assert stats.tensors == len(weights) + sum(map(fp8.is_quantized, weights))
            info = httpx.get(f"{server.address}/model_info", headers=server.headers, timeout=30).json()
            assert info["weight_version"] == str(push)
        for name, engine in (
            ("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", r"1.mlp.experts.w13_weight_scale_inv \("),
            ("model.layers.0.self_attn.v_proj.weight", r"0.self_attn.qkv_proj.weight \("),
        ):
            tamper(sync, partial(flip, name=name))
            with pytest.raises(WeightSyncError, match=f"checksums differ .*{engine}"):
                sync.push(iter(weights.items()), version="flipped")


def flip(bucket: Bucket, name: str) -> None:
    if (data := bytes_of(bucket, name)) is not None:
        data[2] ^= 1

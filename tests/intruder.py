"""Another user of the machine, who tries what a running job leaves open: a script of the standard library alone.

Reads {addresses, folders, processes} as JSON and prints what worked, a line of JSON each.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

OPEN_TO_ALL = ("/health", "/ready", "/metrics")
"""Paths of SGLang that probes of a cluster ask without a key."""
GETS = (
    "/server_info",
    "/model_info",
    "/get_server_info",
    "/v1/models",
    "/v1/loads",
    "/workers",
    "/metrics",
    "/docs",
    "/openapi.json",
)
POSTS = {
    "/generate": {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}},
    "/v1/chat/completions": {"model": "x", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "x", "prompt": "x"},
    "/reward": {"reward": 1.0},
    "/flush_cache": {},
    "/pause_generation": {"mode": "retract"},
    "/continue_generation": {},
    "/abort_request": {"rid": "", "abort_all": True},
    "/update_weight_version": {"new_version": "evil", "abort_all_requests": False},
    "/update_weights_from_disk": {"model_path": "/tmp"},
    "/update_weights_from_tensor": {"serialized_named_tensors": [""], "load_format": "flattened_bucket"},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weights_update_group": {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/send_weights_to_remote_instance": {},
    "/weights_checker": {"action": "checksum", "selector": "target"},
    "/get_weights_by_name": {"name": "model.norm.weight"},
    "/release_memory_occupation": {"tags": ["weights"]},
    "/load_lora_adapter": {"lora_name": "x", "lora_path": "/tmp"},
    "/configure_logging": {"log_requests": True, "dump_requests_folder": "/tmp"},
    "/set_internal_state": {"server_args": {}},
    "/open_session": {"capacity_of_str_len": 8},
    "/classify": {"input_ids": [5]},
    "/encode": {"input_ids": [5]},
    "/v1/embeddings": {"model": "x", "input": "x"},
    "/start_profile": {},
    "/freeze_gc": {},
}


def answers(address: str) -> Iterator[str]:
    """Requests that a server did not refuse; nothing of what does not speak HTTP."""
    try:
        urllib.request.urlopen(f"{address}/", timeout=5).close()
    except urllib.error.HTTPError:
        pass
    except (OSError, http.client.HTTPException):
        return
    asked = [(path, None) for path in GETS] + list(POSTS.items())
    for path, body in asked:
        if path.startswith(OPEN_TO_ALL):
            continue
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer guessed"}
        for sent in (headers, {"Content-Type": "application/json"}):
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"{address}{path}", data, sent), timeout=30
                ) as reply:
                    yield f"{address}{path} answers {reply.status}"
            except urllib.error.HTTPError as error:
                if error.code not in (401, 403, 404, 405):
                    yield f"{address}{path} answers {error.code}"
            except (OSError, http.client.HTTPException):
                pass


def readable(folder: str) -> Iterator[str]:
    """Files that can be read, or folders in which one could be made."""
    for place, folders, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in folders)):
            if os.access(path, os.W_OK) and not os.path.islink(path):
                yield f"{path} can be written to"
        for name in files:
            with contextlib.suppress(OSError), open(os.path.join(place, name), "rb"):
                yield f"{os.path.join(place, name)} can be read"


def inside(process: int) -> Iterator[str]:
    """Parts of a process that can be read beside its command line."""
    for name in ("environ", "mem", "maps", "fd", "cwd"):
        path = f"/proc/{process}/{name}"
        with contextlib.suppress(OSError):
            if name in ("fd", "cwd"):
                os.listdir(path)
            else:
                with open(path, "rb") as file:
                    file.read(1)
            yield f"{path} can be read"


def below(process: int) -> list[int]:
    """A process and its descendants."""
    found = [process]
    for one in found:  # which grows meanwhile
        with contextlib.suppress(OSError, ValueError):
            for task in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{task}/children") as children:
                    found += map(int, children.read().split())
    return found


def ports_of(processes: list[int]) -> list[tuple[str, int]]:
    """(address, port) on which processes listen over IPv4 and IPv6; 0.0.0.0 and :: are all addresses."""
    sockets = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for file in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{process}/fd/{file}"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as lines:
            for line in [*lines][1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                    address, _, port = local.partition(":")
                    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
                    found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return sorted(set(found))


def main() -> None:
    """Try everything."""
    job = json.load(sys.stdin)
    with ThreadPoolExecutor(32) as threads:
        for found in threads.map(lambda address: [*answers(address)], job["addresses"]):
            for line in found:
                print(json.dumps(line))
    for folder in job["folders"]:
        for found in readable(folder):
            print(json.dumps(found))
    for process in job["processes"]:
        for found in inside(process):
            print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Compile the CUDA kernels that SGLang would compile when a server first needs them, so that no server waits for them.

    .venv-rollout/bin/python tools/prewarm.py [JOBS]

requirements/rollout.kernels.json lists the kernels for the widths of the released models on GPUs of compute capability 9.0, as
a dry run found them (tests/platform/test_dry_run.py). They are compiled for that capability, JOBS at a time (by default one per
core), into SGLang's cache: $SGLANG_JIT_CACHE_DIR, or ~/.cache/sglang/jit. No GPU is needed. The exit status is 1 if a kernel
could not be compiled; its name and the end of the compiler's output are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
KERNELS = REPOSITORY / "requirements" / "rollout.kernels.json"
CAPABILITY = (9, 0)


def main(jobs: int) -> int:
    sys.path.insert(0, str(REPOSITORY))
    from megatron_rl.servers.own_environment import cuda_tools

    os.environ.update(cuda_tools(Path(sys.executable)))
    from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
    from sglang.kernels.jit.utils.compile.loader import load_jit

    def build(module: tuple[list[str], dict]) -> str:
        """Compile one kernel; return its error, or an empty text."""
        try:
            load_jit(*module[0], **module[1])
        except Exception as error:
            return f"{' '.join(module[0])}: {str(error).strip()[-2000:]}"
        return ""

    modules = json.loads(KERNELS.read_text())
    started = time.monotonic()
    with override_jit_cuda_arch(*CAPABILITY), ThreadPoolExecutor(jobs) as pool:
        failed = [error for error in pool.map(build, modules) if error]
    print(*failed, sep="\n", file=sys.stderr, end="\n" if failed else "")
    done = f"{len(modules) - len(failed)} of {len(modules)} CUDA kernels of SGLang"
    print(f"{done} are compiled, after {time.monotonic() - started:.0f} s", flush=True)
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "jobs", nargs="?", type=int, default=os.cpu_count() or 1, help="number of compilers to run at a time"
    )
    raise SystemExit(main(parser.parse_args().jobs))

"""Starts SGLang's server with the stand-ins and replacements of this package."""

from __future__ import annotations

import gc
import runpy
import sys

from sglang_on_cpu import FLAGS, prepare

if __name__ == "__main__":
    gc.set_threshold(100_000, 20, 20)  # a quarter of the import time was garbage collection, which found nothing
    prepare()
    from sglang_on_cpu import replacements

    replacements.install()
    sys.argv[1:1] = FLAGS
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)

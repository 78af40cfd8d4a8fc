"""The first that the server imports from which tests' processes are forked: imports make no garbage; frozen.py ends this."""

import gc

gc.disable()

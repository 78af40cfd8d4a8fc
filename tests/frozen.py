"""The last that the server imports from which tests' processes are forked.

What is there by now stays: no process looks at its million objects again when it collects garbage, which took a second each
time, and copied the pages. Servers of programs are forked too.
"""

import gc

from tests import forked_servers

forked_servers.install()
gc.enable()
gc.collect()
gc.freeze()

"""Stand-in that cannot be imported, so that SGLang runs without flashinfer.

Without a GPU, flashinfer only costs 3 s of imports.
"""

raise ImportError("flashinfer needs a GPU")

"""Stand-in that cannot be imported, so that SGLang runs without flashinfer.

Without a GPU, flashinfer is not used, and its import takes 3 s.
"""

raise ImportError("flashinfer needs a GPU")

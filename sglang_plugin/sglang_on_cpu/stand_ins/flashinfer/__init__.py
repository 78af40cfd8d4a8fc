"""Stand-in that cannot be imported, so that SGLang does without flashinfer: without a GPU it only costs 3 s of imports."""

raise ImportError("flashinfer needs a GPU")

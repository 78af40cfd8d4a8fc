"""Where there is no GPU the real package is three seconds of imports and nothing else: to SGLang it is not installed."""

raise ImportError("flashinfer needs a GPU")

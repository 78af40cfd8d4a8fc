"""SGLang servers: their processes, their HTTP client, and fleets of external servers."""

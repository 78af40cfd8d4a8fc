"""SGLang: the server process, the HTTP client, the sampling contract and the trajectories."""

"""SGLang's servers: their processes, their HTTP client, and fleets of them."""

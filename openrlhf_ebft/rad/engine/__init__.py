"""RAD in a continuously batching engine: request arguments, prefix cache and batched scoring, engine-free."""

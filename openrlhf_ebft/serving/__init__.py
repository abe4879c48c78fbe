"""A server of reward-augmented decoding: Ray Serve around vLLM's OpenAI-compatible layer."""

"""Energy-based fine-tuning and reward-augmented decoding on Ray."""

__version__ = "0.1.0"

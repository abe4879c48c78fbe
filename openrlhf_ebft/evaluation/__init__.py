"""Measures a model beyond the loss: bootstrap intervals, pass@k of generated code, translation, n-gram overlap."""

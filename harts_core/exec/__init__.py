"""Execution of plan bundles: kernels, layers, model, training loop."""

"""Weights on disk: Hugging Face ``bailing_hybrid`` checkpoints (config.json and safetensors files)."""

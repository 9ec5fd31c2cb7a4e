"""HARTS core library: rollout trees, plans, execution."""

__version__ = "0.1.0"

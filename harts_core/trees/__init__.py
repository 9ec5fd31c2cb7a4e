"""Rollout trees: reading rollouts, sorting and front-coding them, the segment tree. No torch here."""

"""The planner harts: prefix compression and reuse across consumers, decided together."""

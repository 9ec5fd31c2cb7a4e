"""Planning: microbatches, sharing windows, call plans and the bundle that states them. No torch here."""

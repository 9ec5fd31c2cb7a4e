"""Training in many processes: launch, process groups, split layers, reductions, failure."""

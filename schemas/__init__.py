"""Machine-readable schemas of every file and report that HARTS writes, generated from the code."""

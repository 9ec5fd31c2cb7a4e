"""When each unit runs: the single-process order, pipeline schedules as data, their validator and timeline."""

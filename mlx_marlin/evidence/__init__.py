"""What was found out on a machine, as files of the cache and of benchmarks hold it."""

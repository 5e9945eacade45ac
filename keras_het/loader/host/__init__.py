"""Resources that the jobs of a host share: CPUs, reading threads, memory."""

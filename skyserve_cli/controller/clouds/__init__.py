"""Cloud operations: launches, terminations and listings on threads, and the garbage collection of orphaned resources."""

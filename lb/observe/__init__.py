"""What an operator can see: counters, metrics, the access log, explanations of routing decisions, traces."""

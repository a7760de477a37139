"""Load balancer agents: local processes and remote machines, the tables they receive, and the DNS names they serve."""

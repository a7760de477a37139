"""HTTP as values and bytes: pure parts of the load balancer that neither open sockets nor read clocks."""

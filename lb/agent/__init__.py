"""One load balancer agent as a process: composition, listening sockets, admin API, handover, and its supervisor."""

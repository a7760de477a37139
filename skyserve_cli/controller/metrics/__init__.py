"""Prometheus metrics of the controller: the table of families, their exposition, and the port that serves them."""

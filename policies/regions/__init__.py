"""Which region serves a request: policies that choose between the replicas here and the agents of other regions."""

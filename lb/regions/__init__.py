"""Links between the agents of different regions: certificates, the port for peers, beats."""

"""Work on machines over SSH: connections, keys, the steps that set up a machine, and the agent that runs there."""
